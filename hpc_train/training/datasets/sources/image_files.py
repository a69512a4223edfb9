"""The image files below a folder, and those that are skipped; the images of ``predict --data``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpc_train.errors import BadFileError
from hpc_train.experiment.data_facts.data_size import IMAGE_EXTENSIONS
from hpc_train.experiment.data_facts.root_layout import is_skipped
from hpc_train.training.datasets.images import image_content

#: Maximum number of extensions in a notice.
_SHOWN = 5


class Skipped:
    """Counts the files and folders below ``root`` that a listing of images does not read, by reason."""

    LINK, HIDDEN, BESIDE, MASK = (
        "links to folders, which are not followed; move the images there, or link each file",
        "hidden files or folders",
        "files beside the class folders; move images into a class folder",
        "masks without an image",
    )

    def __init__(self, root: Path) -> None:
        self._root = root
        self._counts: Counter[str] = Counter()
        self._extensions: Counter[str] = Counter()
        #: Reason → the first path.
        self._examples: dict[str, str] = {}
        self._unused: list[str] = []

    def add(self, reason: str, path: Path) -> None:
        """Count a path for one of the reasons above."""
        self._counts[reason] += 1
        self._examples.setdefault(reason, self._shown(path))

    def add_other(self, path: Path) -> None:
        """Count a file whose extension is not that of an image."""
        self._extensions[path.suffix.lower() or "none"] += 1
        self._examples.setdefault("", self._shown(path))

    def add_beside_classes(self, folder: Path) -> None:
        """Count the entries of a split's folder outside the class folders."""
        for path in sorted(folder.iterdir()):
            if is_skipped(path.name):
                self.add(self.HIDDEN, path)
            elif not path.is_dir():
                self.add(self.BESIDE, path)

    def add_unused_folders(self, used: Sequence[Path | None]) -> None:
        """Note the folders in the root other than the splits that are read."""
        for path in sorted(self._root.iterdir()):
            if path in used or not path.is_dir():
                continue
            if is_skipped(path.name):
                self.add(self.HIDDEN, path)
            else:
                self._unused.append(path.name)

    def notices(self) -> tuple[str, ...]:
        """Return one line per reason."""
        lines = [
            f"data.root: not read: {count} {reason} (first: {self._examples[reason]})"
            for reason, count in self._counts.items()
        ]
        if self._extensions:
            shown = ", ".join(f"{name} {count}" for name, count in self._extensions.most_common(_SHOWN))
            lines.append(
                f"data.root: not read: {self._extensions.total()} files with other extensions ({shown}; "
                f"first: {self._examples['']}); images are {', '.join(IMAGE_EXTENSIONS)}"
            )
        if self._unused:
            shown = ", ".join(self._unused[:_SHOWN])
            more = f" and {len(self._unused) - _SHOWN} more" if len(self._unused) > _SHOWN else ""
            lines.append(f"data.root: not read: the folders {shown}{more} in {self._root}")
        return tuple(lines)

    def _shown(self, path: Path) -> str:
        return os.fspath(path.relative_to(self._root)) if path.is_relative_to(self._root) else os.fspath(path)


class ImageFiles:
    """A ``FileSplit`` of one image file, or of all images below a folder, in alphabetical order.

    Every target is 0. Raises BadFileError if there is no image.
    """

    def __init__(self, root: Path, channels: int) -> None:
        self.channels = channels
        skipped = Skipped(root)
        self._files = [root] if root.is_file() else list(images_below(root, skipped))
        #: Lines about unread entries below the folder.
        self.notices = tuple(line.replace("data.root", "--data", 1) for line in skipped.notices())
        if not self._files:
            raise BadFileError(
                f"--data: {root} is neither an image nor a folder with images "
                f"({', '.join(IMAGE_EXTENSIONS)}); fix the path"
            )

    def __len__(self) -> int:
        return len(self._files)

    def file_content(self, index: int, /) -> tuple[bytes, int]:
        """Return the content of a sample's file, and 0."""
        return image_content(os.fspath(self._files[index])), 0

    def path(self, index: int) -> Path:
        """Return the file of a sample."""
        return self._files[index]


def images_below(folder: Path, skipped: Skipped) -> Iterator[Path]:
    """Yield the images below a folder, sorted, without hidden files and links to folders.

    Skipped entries are counted in ``skipped``. Raises BadFileError for a folder that can't be listed, whose
    images would be missing, perhaps on some ranks only.
    """
    for parent, folders, names in os.walk(folder, onerror=_raise_unlisted):
        for name in [name for name in folders if is_skipped(name)]:
            skipped.add(skipped.HIDDEN, Path(parent, name))
            folders.remove(name)
        folders.sort()
        for path in (Path(parent, name) for name in folders):
            if path.is_symlink():
                skipped.add(skipped.LINK, path)
        for name in sorted(names):
            if is_skipped(name):
                skipped.add(skipped.HIDDEN, Path(parent, name))
            elif name.lower().endswith(IMAGE_EXTENSIONS):
                yield Path(parent, name)
            else:
                skipped.add_other(Path(parent, name))


def _raise_unlisted(error: OSError) -> None:
    if isinstance(error, FileNotFoundError):  # val may lack a class
        return
    raise BadFileError(
        f"data: the folder {error.filename} can't be listed: {error.strerror}; make it readable, or remove it"
    ) from error
