"""The scripts of ``examples/programs``, and the weights with which they end."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests import warm
from tests.end_to_end.runs import ONE_THREAD, REPOSITORY
from tests.workloads.programs import HELD

PROGRAMS = REPOSITORY / "examples" / "programs"
NAMES = sorted(path.parent.name for path in PROGRAMS.glob("*/train.py"))
#: Names of the files of a program: its script as it is, with ``resume``; and with a session.
MODES = ("plain", "session")


def copied(name: str, folder: Path) -> Path:
    """Copy a program's files to a new folder of code; return it."""
    shutil.copytree(
        PROGRAMS / name, folder, ignore=shutil.ignore_patterns("out", "checkpoints", "wandb", "__*")
    )
    return folder


def torchrun(code: Path, script: str, *arguments: str) -> subprocess.Popen[str]:
    """Start the script on two ranks by torchrun, without hpc-train; torchrun and its ranks are forked."""
    shutil.copy(HELD, code)
    words = ["--standalone", "--nproc-per-node=2", "--no-python"]
    words += warm.task(HELD.name, script, *arguments)
    environment = os.environ | ONE_THREAD | warm.for_jobs()
    if warm.DOOR in environment:
        environment["MUST_BE_FORKED"] = "yes"
    pipe = subprocess.PIPE
    return warm.start_module(
        "torch.distributed.run", *words, cwd=code, env=environment, stdout=pipe, stderr=pipe, text=True
    )


def weights(folder: Path) -> dict[str, Any]:
    """Return the weights in a working folder by name, nested ones by a path."""
    files = sorted((folder / "out").glob("*.safetensors"))
    if files:
        return {f"{file.name}/{name}": value for file in files for name, value in load_file(file).items()}
    return _flat(torch.load(folder / "out" / "weights.pt"))


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value}
    return flat


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if both have the same tensors, bitwise."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
