"""Child processes: the copy of the package and the user's modules that they import, and their answer.

A user's ``logging.py`` or ``types.py`` must not replace Python's own module, without which no process starts.
Entries of ``PYTHONPATH`` precede the standard library on ``sys.path``. So a folder with such a file is put
into a variable of ours, and inserted after the standard library when this package is imported.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Folder that this copy of the package is imported from.
PACKAGE_PARENT = str(Path(__file__).parents[1])
#: Folders that follow the standard library on ``sys.path``, separated like those of ``PYTHONPATH``.
LATE_VARIABLE = "HPC_TRAIN_LATE_PATH"


def with_package(environment: Mapping[str, str], places: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment of a child process that imports this copy of the package from any folder.

    ``places``: folders to import from instead, such as a run's snapshot. The child does not import from the
    current folder unless ``places`` contains it.
    """
    found = path_variables(places or (PACKAGE_PARENT,))
    for name in ("PYTHONPATH", LATE_VARIABLE):
        found[name] = os.pathsep.join(filter(None, (found[name], environment.get(name))))
    return {**environment, **found}


def path_variables(places: Iterable[str]) -> dict[str, str]:
    """Return the variables with which a new Python imports from these places and its own folders only."""
    late: list[str] = []
    early: list[str] = []
    for place in places:
        (late if hidden_modules(place) else early).append(place)
    return {
        "PYTHONPATH": os.pathsep.join(early),
        LATE_VARIABLE: os.pathsep.join(late),
        "PYTHONSAFEPATH": "1",
    }


def hidden_modules(place: Path | str) -> list[Path]:
    """Return the files and packages in a folder that have the name of a standard library module, sorted.

    A folder without ``__init__.py`` is excluded: Python prefers its own module.
    """
    try:
        with os.scandir(place) as entries:
            named = [each for each in entries if each.name.split(".")[0] in sys.stdlib_module_names]
    except OSError:
        return []
    found = (Path(each.path) for each in named)
    return sorted(
        path for path in found if path.suffix in {".py", ".pyc", ".so"} or (path / "__init__.py").is_file()
    )


def add_late_places() -> None:
    """Insert the folders of ``LATE_VARIABLE`` into ``sys.path``, after the standard library's."""
    places = [each for each in os.environ.get(LATE_VARIABLE, "").split(os.pathsep) if each]
    library = str(Path(os.__file__).parent)
    ours = [at for at, entry in enumerate(sys.path) if entry in {library, f"{library}/lib-dynload"}]
    at = ours[-1] + 1 if ours else len(sys.path)
    sys.path[at:at] = [each for each in places if each not in sys.path]


def answer_in(output: str | bytes) -> dict[str, Any] | None:
    """Return the last JSON object that is a line; None without one.

    Others may print before and after it: a site's Python, a model's code, a wrapper.
    """
    text = output.decode("utf-8", "replace") if isinstance(output, bytes) else output
    for line in reversed(text.split("\n")):
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict):
            return answer
    return None
