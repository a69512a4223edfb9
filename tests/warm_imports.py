"""What the fork server of tests/warm.py imports, and how a fork makes hpc_train's modules its own.

A rank imports hpc_train from its run's snapshot, a command from where Python finds it. The server imports it
from the repository once. Where the files are equal a fork only gives the modules the paths of its own files,
in 10 ms of CPU time rather than 200; where one differs it forgets them all and imports them as usual.
"""

from __future__ import annotations

import _imp
import importlib.util
import os
import runpy
import sys
import types
import weakref
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NamedTuple

_OURS = Path(__file__).parents[1] / "hpc_train"
#: The third-party modules that commands and ``hpc_train.training.main`` import; what is missing, they import.
_THIRD_PARTY = (
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining", "torch.nn.utils.fusion", "torch.utils.data", "torch.export",
    "torch.utils.flop_counter", "pydantic.main", "pydantic.functional_serializers", "pydantic.types",
    "pydantic.type_adapter", "PIL.Image", "PIL.ImageDraw", "safetensors.torch", "simplejpeg", "numpy",
    "numpy.typing", "xxhash", "yaml", "filelock", "stamina", "platformdirs", "submitit.core.submission",
    "typer", "configparser", "netrc", "shellingham", "multiprocessing.popen_fork",
)  # fmt: skip
#: What models and data of many tests need, for seconds of CPU time: after hpc_train, which keeps wandb out of
#: timm.
_AFTER_OURS = ("timm", "torchvision.io", "torchvision.models", "torchvision.transforms.v2")
#: Those of hpc_train that import further ones, as transformers, or that start the command.
_NOT_IMPORTED = (
    "__main__", "training.datasets.sources.image_files", "training.datasets.sources.imagefolder",
    "training.datasets.sources.segmentation_folder", "training.datasets.sources.torchvision",
    "loggers.tensorboard", "training.models.segmentation_models", "training.models.timm",
    "training.models.torchvision", "report.live.", "session", "training.memory_prediction",
    "training.predicted_runs",
)  # fmt: skip


class _Imported(NamedTuple):
    """A module of hpc_train that the server has imported."""

    module: types.ModuleType
    #: Its file within the package's folder.
    file: Path
    source: bytes
    code: types.CodeType
    #: Its globals that name a path within that folder.
    paths: dict[str, Path | str]


_imported: list[_Imported] = []
#: Of the others, and of these where ``match_sys_path`` has forgotten them, the code by source.
_compiled: dict[bytes, types.CodeType] = {}
_usual_get_code = SourceFileLoader.get_code


def import_all() -> None:
    """Import, in the server, what commands and ranks do."""
    for name in _THIRD_PARTY:
        importlib.import_module(name)
    others = set(sys.modules)
    codes: dict[str, types.CodeType] = {}

    def get_code(loader: SourceFileLoader, name: str) -> types.CodeType:
        codes[name] = _code(loader, name)
        return codes[name]

    SourceFileLoader.get_code = get_code  # type: ignore[assignment,method-assign]
    sys.path.insert(0, str(_OURS.parent))
    for name in _names():
        importlib.import_module(name)
    sys.path.remove(str(_OURS.parent))
    SourceFileLoader.get_code = _get_code  # type: ignore[assignment,method-assign]
    more = {name.partition(".")[0] for name in sys.modules} - {name.partition(".")[0] for name in others}
    more -= {_OURS.name, *sys.stdlib_module_names}
    assert not more, f"modules of hpc_train import {more}: add them to _NOT_IMPORTED"
    for name in _AFTER_OURS:
        importlib.import_module(name)
    assert "wandb" not in sys.modules
    for name, code in codes.items():
        if _is_ours(name):
            _imported.append(_imported_as(sys.modules[name], code))
    files = {each.file for each in _imported}
    for file in _OURS.rglob("*.py"):
        if file.relative_to(_OURS) not in files:
            _compiled[file.read_bytes()] = _code(SourceFileLoader("_", str(file)), "_")
    if "fake-cuda" in os.environ.get("LD_PRELOAD", ""):  # whose products take the CPU 4 s per rank (measured)
        vars(sys.modules[f"{_OURS.name}.training.health.node_check"])["_TIMED_SIZE"] = 256
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False  # as a fork ends, torch would remove its operators: 15 ms (measured)


def _code(loader: SourceFileLoader, name: str) -> types.CodeType:
    code = _usual_get_code(loader, name)
    assert code is not None
    return code


def _names() -> Iterator[str]:
    """``pkgutil.walk_packages`` would import packages that are left out, such as ``session``."""
    for file in sorted(_OURS.rglob("*.py")):
        parts = file.relative_to(_OURS.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not name.startswith(tuple(f"{_OURS.name}.{name}" for name in _NOT_IMPORTED)):
            yield name


def _imported_as(module: types.ModuleType, code: types.CodeType) -> _Imported:
    file = Path(str(module.__file__))
    paths = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("__") and isinstance(value, Path | str) and str(value).startswith(str(_OURS))
    }
    return _Imported(module, file.relative_to(_OURS), file.read_bytes(), code, paths)


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == _OURS.name


def match_sys_path() -> None:
    """Move or forget the imported modules so that they are those that this process would import."""
    found = (finder.find_spec(_OURS.name, None) for finder in sys.meta_path)
    spec = next(filter(None, found), None)
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    if folder == _OURS:
        return
    try:
        is_equal = folder is not None and all(
            (folder / each.file).read_bytes() == each.source for each in _imported
        )
    except OSError:
        is_equal = False
    for each in _imported:
        if folder is not None and is_equal:
            _move(each, folder)
        else:
            del sys.modules[each.module.__name__]
            _compiled[each.source] = each.code


def _move(imported: _Imported, folder: Path) -> None:
    module, path = imported.module, str(folder / imported.file)
    spec = module.__spec__
    assert spec is not None and isinstance(spec.loader, SourceFileLoader)
    module.__file__ = spec.origin = spec.loader.path = path
    spec.cached = importlib.util.cache_from_source(path)
    vars(module)["__cached__"] = spec.cached
    if spec.submodule_search_locations is not None:
        module.__path__ = spec.submodule_search_locations = [str(Path(path).parent)]
    for name, value in imported.paths.items():
        setattr(module, name, type(value)(str(value).replace(str(_OURS), str(folder), 1)))
    _imp._fix_co_filename(imported.code, path)  # type: ignore[attr-defined]


def _get_code(loader: SourceFileLoader, name: str) -> types.CodeType:
    """Compile no module whose source is that of one in the repository."""
    # Taken out, as the same source in two files has two objects.
    code = _compiled.pop(loader.get_data(loader.path), None) if _is_ours(name) else None
    if code is None:
        return _code(loader, name)
    _imp._fix_co_filename(code, loader.path)  # type: ignore[attr-defined]
    return code


def run_as_main(name: str) -> None:
    """Do as ``python -m NAME`` does, with ``__main__`` empty and the arguments set."""
    imported = sys.modules.get(name)
    if imported is not None and not hasattr(imported, "__path__"):
        del sys.modules[name]  # runpy would warn
    _, spec, code = runpy._get_module_details(name)  # type: ignore[attr-defined]
    if imported is not None:
        sys.modules[name] = imported
    sys.argv[0] = spec.origin
    runpy._run_code(code, vars(sys.modules["__main__"]), None, "__main__", spec)  # type: ignore[attr-defined]
