"""Model plug-ins: build an ``nn.Module`` from a name of the file.

Importing this package keeps timm from importing wandb, as ``timm.utils.summary`` does if it is installed: the
import takes time, and each process that is killed or skips Python's shutdown, like ranks and the child
processes of commands, leaves two folders of wandb in $TMPDIR.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType

_IMPORTER = "timm.utils.summary"


class _NoWandbForTimm(MetaPathFinder):
    """Refuses wandb to timm, and passes all other imports to the other finders."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "wandb" and _is_importing(_IMPORTER):
            raise ModuleNotFoundError(f"{_IMPORTER} does without wandb here", name=name)
        return None


def _is_importing(module: str) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False


sys.meta_path.insert(0, _NoWandbForTimm())
