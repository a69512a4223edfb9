"""Files whose runs execute ``script.py``, and what became of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from hpc_train.paths import RunPaths

SCRIPT = Path(__file__).with_name("script.py")
TEXT = r"""
name: prog
program:
  command: [python, train.py]
  args: {steps: 20}
  outputs: out
  resume: {if_exists: out/state.json, args: [--resume]}
  metrics: {regex: 'step (?P<step>\d+): loss (?P<loss>\S+)'}
"""


def write_program(folder: Path, text: str = TEXT) -> Path:
    """Write the script and the experiment file into a new folder of code; return the file."""
    code = folder / "code"
    code.mkdir(parents=True, exist_ok=True)
    shutil.copy(SCRIPT, code / "train.py")
    file = code / "exp.yaml"
    file.write_text(text)
    return file


def result(paths: RunPaths) -> dict[str, Any]:
    """Return the final state that the program wrote."""
    found: dict[str, Any] = json.loads((paths.work / "result.json").read_text())
    return found


def weight_after(steps: int, lr: float = 0.01) -> float:
    """Return the weight of a run that nothing disturbed."""
    weight = 1.0
    for step in range(1, steps + 1):
        weight = weight * (1 - lr) + 1e-3 * step
    return weight
