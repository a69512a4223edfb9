"""Runs of the real command, from this checkout, and what they left behind."""

from __future__ import annotations

import atexit
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hpc_train.paths import RunPaths
from hpc_train.run.checkpoints import committed
from tests import warm
from tests.end_to_end import holding
from tests.waiting import HANG_LIMIT_S, came_true

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = HANG_LIMIT_S
#: Modules that experiments of tests name.
_OWN_PARTS = (
    "end_to_end/parts", "end_to_end/paced", "end_to_end/holding", "cli/launchers", "gpu/parts",
    "models/factories", "search/methods", "slurm/aborting", "slurm/bad_node", "slurm/crashing", "slurm/stuck",
    "slurm/visible", "tasks/detectors", "gpu/scarce", "aborts", "waiting",
    "datasets/sources/stand_in_datasets", "end_to_end/flips", "faults/counting",
)  # fmt: skip
#: What a row says of the moment, not of the training.
OF_THE_MOMENT = {
    "time",
    "attempt",
    "step_s",
    "data_wait_s",
    "samples_per_s",
    "tokens_per_s",
    "tflops_per_s",
    "mfu",
    "peak_memory_gib",
}

EXPERIMENT = """\
name: digits
seed: 3
task: classification
model: {name: "tests.end_to_end.parts:net"}
data: {name: digits, augment: {hflip: 0.5, crop_padding: 2}}
optimization:
  steps: 30
  global_batch_size: 48
  micro_batch_size: 12
  optimizer: {name: adamw, lr: 0.003}
  schedule: {name: cosine, warmup_steps: 20}
  clip_grad_norm: 1.0
evaluation: {every_steps: 20}
checkpoint: {every_steps: 7}
logging: {every_steps: 1}
"""

#: Takes as long as the environment says, with time for several faults.
PACED = EXPERIMENT.replace("tests.end_to_end.parts:net", "tests.end_to_end.paced:net").replace(
    "steps: 30", "steps: 60"
)

#: Overrides of a run that compiles: each of its graphs takes seconds of CPU time, so tests share the one that
#: nothing disturbs. Checkpoints 4, 7 and 8.
COMPILED = (
    "compile=true", "model.name=tests.end_to_end.flips:net", "model.args.depth=1", "optimization.steps=8",
    "optimization.schedule.warmup_steps=2", "evaluation.every_steps=3", "checkpoint.keep_every=4",
)  # fmt: skip

#: A task, a data set with dicts as inputs and targets, and a model, none of them from the package.
OWN_TASK = (
    'task="examples.graph_network:TwoTargets"',
    'model={name: "tests.end_to_end.paced:graph_network"}',
    'data={name: "examples.graph_network:graphs"}',
)

#: Each rank computes with one thread. Two threads spin while they wait for each other: on two busy cores a
#: run of one rank took ten times the CPU time.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
#: For ``end_what_is_left``.
_started: list[subprocess.Popen[str]] = []
#: In the environment of a run, and in none of its files. Random, since snapshots hold this file.
PLANTED = f"planted-{secrets.token_hex(8)}"
SECRETS = dict.fromkeys(("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MY_OWN_VARIABLE"), PLANTED)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


@functools.cache
def work_tree() -> Path:
    """Return a folder with the parts that experiments of tests name: a snapshot of the repository takes half
    a second of CPU time more.
    """
    folder = Path(tempfile.mkdtemp(prefix="hpc-train-work-"))
    atexit.register(shutil.rmtree, folder)
    shutil.copytree(REPOSITORY / "examples", folder / "examples")
    for part in _OWN_PARTS:
        path = Path("tests", part).with_suffix(".py")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        for own in (path, *(each / "__init__.py" for each in path.parents[:-1])):
            shutil.copy2(REPOSITORY / own, folder / own)
    return folder


@functools.cache
def installed() -> Path:
    """Return a folder, for PYTHONPATH, that tells commands and ranks of the logger ``holding``."""
    folder = Path(tempfile.mkdtemp(prefix="hpc-train-installed-"))
    atexit.register(shutil.rmtree, folder)
    package = folder / "holding-1.dist-info"
    package.mkdir()
    for name, text in holding.PACKAGE.items():
        (package / name).write_text(text)
    return folder


def hpc_train(
    *arguments: str | Path, cwd: Path | None = None, before: Sequence[str] = (), **environment: str
) -> Done:
    """Run the command to its end in ``cwd``, by default the work tree; ``before``: see ``start``."""
    process = start(*arguments, cwd=cwd, before=before, **environment)
    out, err = process.communicate(timeout=LIMIT_S)
    return Done(process.returncode, out, err)


def start(
    *arguments: str | Path, cwd: Path | None = None, before: Sequence[str] = (), **environment: str
) -> subprocess.Popen[str]:
    """Start the command; ``before``: a command that runs it, such as ``prlimit --nofile=20``."""
    environment = ONE_THREAD | os.environ | environment
    places = filter(None, (environment.get("PYTHONPATH"), str(installed())))
    process = warm.start(
        [*before, sys.executable, "-m", "hpc_train", *map(str, arguments)],
        cwd=cwd or work_tree(),
        env=environment | {"PYTHONPATH": os.pathsep.join(places)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    _started.append(process)
    return process


def end_what_is_left() -> None:
    """Kill the commands that a test that failed left running: they would be blamed on the next one."""
    while _started:
        with _started.pop() as process:  # which closes its pipes and waits for it
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def write_experiment(folder: Path, text: str = EXPERIMENT, name: str = "exp.yaml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    return path


def submit(
    folder: Path, *overrides: str, devices: int = 2, text: str = EXPERIMENT, **environment: str
) -> RunPaths:
    """Submit one run under ``folder`` and see it complete."""
    experiment = write_experiment(folder, text)
    local = ("--local", "--devices", str(devices))
    environment["HPC_TRAIN_RUNS"] = str(folder / "runs")
    done = hpc_train("submit", experiment, *overrides, *local, **environment)
    assert done.code == 0, done.err
    return only_run(folder)


def found_runs(folder: Path) -> list[RunPaths]:
    """Return the runs under ``folder``, without those still being made under a temporary name."""
    return [RunPaths(path.parent) for path in (folder / "runs").glob("*/[!.]*/run.json")]


def only_run(folder: Path) -> RunPaths:
    (found,) = found_runs(folder)
    return found


def files_that_hold(folder: Path, text: str) -> list[Path]:
    """Return the files below ``folder``, hidden ones too, whose bytes hold ``text``."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if text.encode() in path.read_bytes()]


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    assert came_true(condition, limit_s), f"not within {limit_s:g} s: {what}"


def rows(paths: RunPaths, split: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of metrics without what they say of the moment."""
    lines = paths.metrics.read_text().splitlines() if paths.metrics.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    plain = [{key: value for key, value in row.items() if key not in OF_THE_MOMENT} for row in found]
    return [row for row in plain if split in (None, row["split"])]


def last_step(paths: RunPaths) -> int:
    return max((row["step"] for row in rows(paths)), default=0)


def status(paths: RunPaths) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(paths.status.read_text())
    return data


def kill_everything(process: subprocess.Popen[str], paths: RunPaths) -> None:
    """SIGKILL to the launcher and all its ranks at once."""
    record = json.loads(paths.attempt_folders()[-1].record.read_text())
    pids = [rank["pid"] for rank in record["rank_processes"]]
    for pid in [process.pid, *pids]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait(HANG_LIMIT_S)


@contextmanager
def held_run(
    folder: Path,
    step: int,
    *overrides: str,
    devices: int = 2,
    text: str = EXPERIMENT,
    before: Sequence[str] = (),
    **environment: str,
) -> Iterator[tuple[subprocess.Popen[str], RunPaths]]:
    """Submit one run under ``folder``; within the context it waits after the row of ``step``."""
    environment["HPC_TRAIN_RUNS"] = str(folder / "runs")
    with holding.Hold(folder, step) as hold:
        words = (*overrides, hold.override, "--local", "--devices", str(devices))
        process = start("submit", write_experiment(folder, text), *words, before=before, **environment)
        hold.wait(process)
        yield process, only_run(folder)


def killed_run(
    folder: Path, step: int, *overrides: str, needs_checkpoint: bool = False, **options: Any
) -> RunPaths:
    """Submit one run and kill its launcher and ranks after the row of ``step``; options of ``held_run``."""
    with held_run(folder, step, *overrides, **options) as (process, paths):
        if needs_checkpoint:
            wait_for(lambda: bool(committed(paths)) or process.poll() is not None, "a checkpoint")
        kill_everything(process, paths)
    process.communicate()
    assert last_step(paths) == step
    return paths


def resume(paths: RunPaths, *words: str, before: Sequence[str] = (), **environment: str) -> None:
    """Resume a run and see it complete."""
    runs = str(paths.folder.parents[1])
    done = hpc_train("resume", paths.folder, *words, before=before, **{"HPC_TRAIN_RUNS": runs} | environment)
    assert done.code == 0, done.err


def final_tensors(paths: RunPaths) -> dict[str, Any]:
    """Return the newest checkpoint whole: weights, buffers, optimizer state, and its numbers."""
    newest = committed(paths)[0]
    state = json.loads(newest.state.read_text())
    shards = {path.name: load_file(path) for path in newest.folder.glob("*.safetensors")}
    tensors: dict[str, Any] = {
        "scaler": state["scaler"],
        "optimizer": state["optimizer"],
        "step": newest.step,
    }
    for name, entry in state["tensors"].items():
        pieces = [
            # Of several pieces in one shard all but the first have a number.
            (shards[f"shard-{rank:05d}.safetensors"]["..".join([name, *map(str, number)])], offset)
            for rank, offset, _, *number in entry["pieces"]
        ]
        whole = torch.zeros(entry["shape"], dtype=pieces[0][0].dtype)
        for part, offset in pieces:
            place = tuple(slice(begin, begin + n) for begin, n in zip(offset, part.shape, strict=True))
            whole[place] = part
        tensors[name] = whole
    return tensors


def assert_equal_to_the_bit(one: RunPaths, other: RunPaths) -> None:
    """Compare two runs: weights, buffers, optimizer state, every metric and the files of evaluations."""
    ours, theirs = final_tensors(one), final_tensors(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, theirs[name]), f"{name} differs"
        else:
            assert value == theirs[name], f"{name} differs"
    assert rows(one) == rows(other)
    assert evaluation_files(one) == evaluation_files(other)


def evaluation_files(paths: RunPaths) -> dict[str, bytes]:
    files = [path for path in paths.evaluations.rglob("*") if path.is_file()]
    return {str(path.relative_to(paths.evaluations)): path.read_bytes() for path in files}
