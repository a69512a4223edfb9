"""Names → ``module:attr``: built-in parts and plug-ins that pip packages add by entry points.

Importing this module, or listing the names, imports no part. ``load`` does.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from typing import TypeVar

from hpc_train.errors import BadFileError, shortened

_Row = TypeVar("_Row")
#: The key of the file that names a part of each kind; launchers are named on the command line.
_KEYS = {
    "models": "model.name",
    "datasets": "data.name",
    "tasks": "task",
    "transforms": "data.transform",
    "strategies": "parallel.strategy",
    "loggers": "logging.loggers",
    "launchers": "--launcher",
    "search": "sweep.search.method",
}

#: Noun for each kind in messages.
_NOUNS = {
    "models": "provider of models",
    "datasets": "data set or provider",
    "tasks": "task",
    "strategies": "strategy",
    "loggers": "logger",
    "launchers": "launcher",
    "search": "search method",
}

#: Built-in parts of the kinds that need no description without torch.
_BUILT_IN: dict[str, dict[str, str]] = {
    "loggers": {
        "wandb": "hpc_train.loggers.process_logger:WandbLogger",
        "tensorboard": "hpc_train.loggers.tensorboard:TensorboardLogger",
        "mlflow": "hpc_train.loggers.process_logger:MlflowLogger",
        "csv": "hpc_train.loggers.csv_files:CsvLogger",
    },
    "launchers": {
        "local": "hpc_train.launchers.local:LocalLauncher",
        "slurm": "hpc_train.launchers.slurm.launcher:SlurmLauncher",
        "allocation": "hpc_train.launchers.slurm.allocation:AllocationLauncher",
    },
    "search": {"tpe": "hpc_train.search.optuna_tpe:propose"},
}
#: The tables of the other kinds: one row per part, with its torch-free description and its
#: ``implementation``. The tables import this module, so it names them instead of importing them.
_TABLES = {
    "models": "hpc_train.experiment.data_facts.built_in:MODELS",
    "datasets": "hpc_train.experiment.data_facts.built_in:DATA_SETS",
    "tasks": "hpc_train.experiment.data_facts.built_in:TASKS",
    "strategies": "hpc_train.experiment.topology.strategy_traits:BUILT_IN",
}


def parts(kind: str) -> dict[str, str]:
    """Return name → ``module:attr`` of every part of a kind; a package can't replace a built-in one."""
    return _plug_ins(kind) | _built_in(kind)


def target_of(kind: str, name: str) -> str | None:
    """Return the ``module:attr`` of the part of this name, None if there is none.

    Installed packages are searched for plug-ins only if no built-in part has the name.
    """
    return _built_in(kind).get(name) or _plug_ins(kind).get(name)


@cache
def _plug_ins(kind: str) -> dict[str, str]:
    return {entry.name: entry.value for entry in entry_points(group=f"hpc_train.{kind}")}


def _built_in(kind: str) -> dict[str, str]:
    if kind in _BUILT_IN:
        return _BUILT_IN[kind]
    module, _, attr = _TABLES[kind].partition(":")
    table = getattr(importlib.import_module(module), attr)
    return {name: row.implementation for name, row in table.items()}


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that ``word`` is most likely a misspelling of."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return close[0] if close else None


def suggestion(word: str, choices: Iterable[str], otherwise: str | None = None) -> str:
    """Return ``did you mean …?`` if ``word`` is likely a misspelling of a choice, else ``otherwise``.

    By default, ``otherwise`` recommends one of the choices, in their order.
    """
    known = list(choices)
    if close := nearest(word, known):
        return f"did you mean {close}?"
    one_of = "one of " if len(known) > 1 else ""
    return f"write {one_of}{', '.join(known)}" if otherwise is None else otherwise


def split_name(name: str) -> tuple[str, str]:
    """Split ``provider/rest`` at the first slash; a name without one is its own provider, rest empty."""
    provider, _, rest = name.partition("/")
    return provider, rest


def is_factory(name: str) -> bool:
    """Return True if a name of the file is ``package.module:factory`` rather than a provider's."""
    return ":" in name


def lacking_module(module: str) -> str:
    """Return the remedy if no folder or package has ``module``, the start of a name in the file."""
    return (
        f"start hpc-train in the folder that contains {shortened(module)}.py, or install its package for "
        f"{sys.executable}"
    )


def load(kind: str, name: str) -> object:
    """Import and return the part called ``name`` (a provider, an entry point or ``module:attr``).

    Raises BadFileError if there is none of that name or it can't be imported.
    """
    target = name if is_factory(name) else target_of(kind, name)
    if target is None:
        raise BadFileError(f"{_KEYS[kind]}: {'; '.join(unknown_part(kind, name))}")
    module, _, attr = target.partition(":")
    return _attribute(kind, name, module, attr)


def unknown_part(kind: str, name: str) -> tuple[str, str]:
    """Return the problem and the remedy for a name that no part of this kind has."""
    return unknown_name(_NOUNS[kind], name, parts(kind))


def unknown_name(what: str, name: str, known: Iterable[str]) -> tuple[str, str]:
    """Return the problem and the remedy for a name that is not in ``known``."""
    return f"there is no {what} '{shortened(name)}'", suggestion(name, sorted(known))


def load_traits(kind: str, name: str, default: _Row) -> _Row:
    """Import and return a plug-in's torch-free description of its part; ``default`` if it has none.

    It is the entry point of the part's name in the group ``hpc_train.strategy_traits`` (for "strategies"),
    ``hpc_train.data_facts`` ("datasets") or ``hpc_train.task_facts`` ("tasks").
    Raises BadFileError if it can't be imported or is not of the type of ``default``.
    """
    target = _traits(kind).get(name)
    if target is None:
        return default
    module, _, attr = target.partition(":")
    row = _attribute(kind, name, module, attr)
    if not isinstance(row, type(default)):
        noun = "traits" if kind == "strategies" else "facts"
        raise BadFileError(
            f"{_KEYS[kind]}: the {noun} of {name!r} are a {type(row).__name__}; "
            f"export a {type(default).__module__}.{type(default).__name__}"
        )
    return row


def described(kind: str) -> list[str]:
    """Return the names of installed plug-ins that come with a torch-free description of the part."""
    return sorted(_traits(kind).keys() & parts(kind).keys() - _built_in(kind).keys())


@cache
def _traits(kind: str) -> dict[str, str]:
    groups = {"strategies": "strategy_traits", "datasets": "data_facts", "tasks": "task_facts"}
    return {entry.name: entry.value for entry in entry_points(group=f"hpc_train.{groups[kind]}")}


def _attribute(kind: str, name: str, module: str, attr: str) -> object:
    found = _imported(kind, name, module)
    begun = f"{module}:"
    for step in attr.split("."):
        try:
            found = getattr(found, step)
        except AttributeError as error:
            close = nearest(step, [each for each in dir(found) if not each.startswith("_")])
            remedy = f"did you mean {begun}{close}?" if close else f"fix the name {name!r}"
            raise BadFileError(f"{_KEYS[kind]}: module {module!r} has no {attr!r}; {remedy}") from error
        begun += f"{step}."
    return found


@contextmanager
def refusing_exit(what: str) -> Iterator[None]:
    """Raise BadFileError if a part exits the process: its exit code would be mistaken for ours."""
    try:
        yield
    except SystemExit as error:
        raise BadFileError(
            f"{what} calls sys.exit({error.code!r}); remove the call (`if __name__ == '__main__':` keeps it "
            "for a script), or name another part"
        ) from error


@contextmanager
def importing(package: str, extra: str, needed_by: str, otherwise: str = "") -> Iterator[None]:
    """Raise BadFileError if the import of ``package`` fails, which the optional ``extra`` installs.

    ``needed_by`` begins the message, ``otherwise`` ends it.
    """
    try:
        yield
    except ImportError as error:
        raise BadFileError(
            f"{needed_by} needs the package {package}, which can't be imported here ({error}); "
            f"install it with pip install 'hpc-train[{extra}]'{otherwise}"
        ) from error


def _imported(kind: str, name: str, module: str) -> object:
    try:
        with refusing_exit(f"{_KEYS[kind]}: {name!r}: importing {module}"):
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module + ".").startswith(error.name + "."):
            raise  # the module was found; a module that it imports was not
        remedy = lacking_module(error.name)
        if not is_factory(name):  # the name of a plug-in
            remedy = f"install its package for {sys.executable}, or fix the name"
        raise BadFileError(
            f"{_KEYS[kind]}: {name!r} can't be imported: no module {error.name!r}; {remedy}"
        ) from error
