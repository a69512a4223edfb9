"""Experiment files that the tests of this folder change."""

from __future__ import annotations

from pathlib import Path

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.problems import ProblemLine
from hpc_train.experiment.validate.loading import Loaded, load

GOOD = """\
name: digits-test
task: classification
model:
  name: acme.models:tiny
data:
  name: digits
optimization:
  epochs: 3
  global_batch_size: 64
  micro_batch_size: 16
  optimizer: {name: sgd, lr: 0.1}
"""


def loaded_file(folder: Path, *overrides: str, text: str = GOOD) -> Loaded:
    """Write a file and load it; names of models and others are not looked up."""
    (folder / "exp.yaml").write_text(text)
    return load(folder / "exp.yaml", overrides, check_names=False)


def problems_of(folder: Path, text: str | bytes, *overrides: str) -> list[ProblemLine]:
    """Return the lines that ``load`` complains with, the file shown as ``exp.yaml``; none for a good file."""
    path = folder / "exp.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    try:
        load(path, overrides)
    except BadFileError as error:
        return [_named(line, str(path)) for line in error.problems]
    return []


def _named(line: str, path: str) -> ProblemLine:
    assert isinstance(line, ProblemLine)
    return ProblemLine(line.replace(path, "exp.yaml"), line.code, line.key)


def code_and_key(line: str) -> tuple[str, str]:
    """Return which problem a line reports, and of which key."""
    assert isinstance(line, ProblemLine)
    return line.code, line.key
