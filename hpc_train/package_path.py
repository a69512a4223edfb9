"""Child processes: which copy of the package they import, and the answer in their output."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Where this copy of the package is imported from.
PACKAGE_PARENT = str(Path(__file__).parents[1])


def with_package(environment: Mapping[str, str], places: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment of a child process that imports this copy of the package from any folder.

    ``places``: where it imports from instead, such as a run's snapshot.
    """
    path = os.pathsep.join(filter(None, (*(places or (PACKAGE_PARENT,)), environment.get("PYTHONPATH"))))
    return {**environment, "PYTHONPATH": path}


def answer_in(output: str | bytes) -> dict[str, Any] | None:
    """Return the last line that is a JSON object; None if there is none.

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
