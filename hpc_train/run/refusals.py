"""Errors whose cause is the environment of a process: reached limits, variables, refused system calls.

Called instead of showing a traceback: by the command line, and by a rank before its first step.
"""

from __future__ import annotations

import os
from pathlib import Path

from hpc_train.errors import shortened
from hpc_train.run.resource_limits import reached
from hpc_train.run.storage_errors import place_of

#: Prefixes of the variables that libraries read on import.
_READ_BY_LIBRARIES = ("TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG", "TORCHINDUCTOR_", "TRITON_")


def refusal(error: BaseException) -> str | None:
    """Return ``error`` in one line that names its cause in this environment; None if it is elsewhere."""
    resource, limits = reached(error)
    if limits and resource is not None:
        return f"{_line(resource)}{limits}; raised at {place_of(resource)}"
    if name := _variable(error):
        return f"{name}={os.environ[name]}: {_line(error)}; correct the variable, or unset it"
    return None


def _line(error: BaseException) -> str:
    text = ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))
    return shortened(text, 300)


def _variable(error: BaseException) -> str | None:
    """Return the variable that ``error`` names, or whose value it quotes."""
    for name, value in os.environ.items():
        if not value or not name.startswith(_READ_BY_LIBRARIES):
            continue
        if isinstance(error, ValueError) and (name in str(error) or f"settings: {value}," in str(error)):
            return name
        if isinstance(error, OSError) and isinstance(error.filename, str):
            path = Path(error.filename)
            if path == Path(value) or (value.startswith("/") and path.is_relative_to(value)):
                return name
    return None
