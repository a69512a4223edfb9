"""The images below a folder, without classes: what ``hpc-train predict --data`` reads."""

from __future__ import annotations

from pathlib import Path

from hpc_train.datasets.sources.imagefolder import images_below
from hpc_train.errors import BadFileError


class ImageFiles:
    """A ``FileSplit`` of one image file, or of all images below a folder, in alphabetical order.

    Every target is 0. Raises BadFileError if there is no image.
    """

    def __init__(self, root: Path, channels: int) -> None:
        self.channels = channels
        self._files = [root] if root.is_file() else list(images_below(root))
        if not self._files:
            raise BadFileError(f"--data: {root} is neither an image nor a folder with images; fix the path")

    def __len__(self) -> int:
        return len(self._files)

    def file_content(self, index: int, /) -> tuple[bytes, int]:
        """Return what the file of a sample contains, and 0."""
        return self._files[index].read_bytes(), 0

    def path(self, index: int) -> Path:
        """Return the file of a sample."""
        return self._files[index]
