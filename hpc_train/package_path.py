"""Lets child processes import this copy of the package, from whichever folder they start."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Where this copy of the package is imported from.
PACKAGE_PARENT = str(Path(__file__).parents[1])


def with_package(environment: Mapping[str, str], places: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment of a child process that imports this copy of the package from any folder.

    ``places``: where it imports from instead, such as a run's snapshot.
    """
    path = os.pathsep.join(filter(None, (*(places or (PACKAGE_PARENT,)), environment.get("PYTHONPATH"))))
    return {**environment, "PYTHONPATH": path}
