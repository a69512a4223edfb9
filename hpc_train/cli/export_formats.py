"""The formats of ``hpc-train export``: their selection and the packages that they need."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from hpc_train.console import say
from hpc_train.errors import UsageError

WEIGHTS = "safetensors"
#: Format → the suffix that selects it.
PROGRAM_SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2"}
#: Without onnxruntime, ONNX's slower reference runs the exported file to check it.
_NEEDED = {"onnx": ("onnx", "onnxscript")}


def format_of(output: Path, choice: str | None) -> str:
    """Return the chosen format, by default the one for the suffix of ``output``.

    Raises UsageError if there is no such format, the suffix belongs to another one, or a package is missing.
    """
    of_suffix = next((form for form, end in PROGRAM_SUFFIXES.items() if output.suffix == end), WEIGHTS)
    form = of_suffix if choice is None else choice
    formats = [WEIGHTS, *PROGRAM_SUFFIXES]
    if form not in formats:
        raise UsageError(f"--format: unknown format {form!r}; write one of {', '.join(formats)}")
    suffixes = [f".{WEIGHTS}", *PROGRAM_SUFFIXES.values()]
    if choice is None and output.suffix and output.suffix not in suffixes:
        say(f"-o {output}: written as {WEIGHTS}; the suffixes of formats are {', '.join(suffixes)}")
    is_clear = of_suffix == WEIGHTS and output.suffix != f".{WEIGHTS}"
    if form != of_suffix and not is_clear:
        suffix = PROGRAM_SUFFIXES.get(form, f".{WEIGHTS}")
        raise UsageError(
            f"--format {form}: {output} has the suffix of {of_suffix}; write {output.with_suffix(suffix)}, "
            "or omit --format"
        )
    if missing := [name for name in _NEEDED.get(form, ()) if find_spec(name) is None]:
        raise UsageError(
            f"--format {form}: {' and '.join(missing)} not installed for {sys.executable}; "
            f"run pip install 'hpc-train[{form}]'"
        )
    return form
