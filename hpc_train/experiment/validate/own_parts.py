"""The user's own parts, ``package.module:factory``: is there a module here that defines the name?

The module is looked for and parsed, but not imported: it may import torch, which takes seconds. Called by
``validate``, ``plan`` and ``submit``, which run beside the code.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from hpc_train.errors import shortened
from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.config.schema import Experiment, SlurmConfig
from hpc_train.experiment.config.synonyms import as_factory
from hpc_train.registry import is_factory, lacking_module, nearest

#: A larger module is not parsed.
_MAX_BYTES = 4 << 20
#: Statements that have names of their own inside.
_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def missing_parts(
    experiments: Iterable[Experiment], code_root: Callable[[], Path | None]
) -> Iterator[Problem]:
    """Yield the problems of each ``package.module:factory``, if ranks have this command's environment.

    ``code_root`` finds the root of the work tree, from which ranks import too.
    """
    here = [experiment for experiment in experiments if _has_this_environment(experiment)]
    named = {
        (path, name): None  # each once: the thousands of runs of a sweep name the same
        for experiment in here
        for path, name in (
            (("model", "name"), experiment.model.name),
            (("data", "name"), experiment.data.name),
            (("task",), experiment.task),
            (("data", "transform"), experiment.data.transform.name if experiment.data.transform else ""),
        )
        if is_factory(name)
    }
    places = _places(code_root()) if named else []
    for path, name in named:
        if problem := _missing(name, places):
            yield Problem(path, *problem, code="part.missing")


def _has_this_environment(experiment: Experiment) -> bool:
    """Return True if nothing in the file changes the module search path of the ranks' Python."""
    environment, slurm = experiment.environment, experiment.slurm
    has_own = environment.python or environment.container or environment.modules
    return not has_own and (slurm is None or slurm.profile == SlurmConfig().profile)


def _missing(name: str, places: list[Path]) -> tuple[str, str] | None:
    """Return the problem with a name and the remedy; None also if only an import could show it."""
    module, _, attribute = name.partition(":")
    if module.endswith(".py") and Path(module).is_file():
        return (
            f"{shortened(module)} is a file, and the name starts with a module",
            f"write {as_factory(name)}",
        )
    parent = ""
    *packages, last = module.split(".")
    for package in packages:
        places = _subfolders(places, package) or ([] if parent else _installed(package))
        if not places:
            return _no_module(parent, package, ())
        parent = f"{parent}.{package}".lstrip(".")
    files = (file for place in places for file in (place / last / "__init__.py", place / f"{last}.py"))
    source = next((file for file in files if file.is_file()), None)
    if source is not None:
        return _undefined(source, attribute.partition(".")[0])
    if _subfolders(places, last) or any(_is_compiled(place, last) for place in places):
        return None
    if not parent and _spec(last) is not None:
        return None
    return _no_module(parent, last, places)


def _places(root: Path | None) -> list[Path]:
    """Return the ranks' module search path: the current folder, the work tree's root, ``sys.path``."""
    on_path = [Path(entry) for entry in sys.path if entry and Path(entry).is_dir()]
    return [Path.cwd(), *([] if root is None else [root]), *on_path]


def _subfolders(places: Iterable[Path], package: str) -> list[Path]:
    return [place / package for place in places if (place / package).is_dir()]


def _installed(package: str) -> list[Path]:
    """Return the folders of a package that an import hook finds, such as one in editable mode."""
    spec = _spec(package)
    return [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]


def _spec(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module) if module.isidentifier() else None
    except (ImportError, ValueError):  # of __main__, among others
        return None


def _is_compiled(place: Path, module: str) -> bool:
    return any(place.glob(f"{module}.*.so")) or (place / f"{module}.so").is_file()


def _no_module(parent: str, module: str, places: Iterable[Path]) -> tuple[str, str]:
    message = f"there is no module '{shortened(module)}'" + (f" in package {parent}" if parent else "")
    around = [Path.cwd()] if not parent else places
    close = nearest(module, (file.stem for place in around for file in place.glob("*.py")))
    if close:
        return message, f"did you mean {f'{parent}.' if parent else ''}{close}?"
    if parent:
        return message, "fix the name"
    return message, lacking_module(module)


def _undefined(source: Path, attribute: str) -> tuple[str, str] | None:
    where = os.path.relpath(source) if source.is_relative_to(Path.cwd()) else str(source)
    try:
        if source.stat().st_size > _MAX_BYTES:
            return None
        with tokenize.open(source) as file:
            tree = ast.parse(file.read(), str(source))
    except SyntaxError as error:
        return f"{where}:{error.lineno}: {error.msg}", "fix the syntax error"
    except (OSError, ValueError, RecursionError, MemoryError):
        return None  # importing it may still work; if not, the error is Python's
    names = _defined(tree)
    if names is None or attribute in names:
        return None
    close = nearest(attribute, names)
    callables = [node.name for node in tree.body if isinstance(node, _Scope) and node.name[0] != "_"]
    remedy = "write the name of a function or class in it"
    if close or callables:
        remedy = f"did you mean {close}?" if close else f"write one of {', '.join(callables[:5])}"
    return f"{where} defines no '{shortened(attribute)}'", remedy


def _defined(tree: ast.Module) -> set[str] | None:
    """Return the names that a module defines or imports; None if only running it could show them."""
    names: set[str] = set()
    remaining: list[ast.AST] = list(tree.body)
    while remaining:
        node = remaining.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
                continue
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Name(id="globals" | "setattr" | "exec"):
                return None
        remaining += ast.iter_child_nodes(node)
    return None if names & {"*", "__getattr__"} else names
