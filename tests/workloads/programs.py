"""Files whose runs execute ``script.py``, and what became of them."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hpc_train.experiment.config.schema import Program
from hpc_train.paths import RunPaths
from hpc_train.workloads.program_metrics import ProgramMetrics
from tests import warm
from tests.end_to_end.runs import found_runs, hpc_train, last_step, only_run, resume, start, status, wait_for
from tests.waiting import HANG_LIMIT_S

#: Runs a script in a fork, and one that a test holds.
HELD = Path(__file__).with_name("held.py")
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


#: A DDP script with ``hpc_train.session``.
SESSION_SCRIPT = SCRIPT.with_name("session_script.py")
SESSION_TEXT = """
name: prog
program: {command: [python, train.py], args: {steps: 30}}
"""

#: A DDP script that ends at step 30, by early stopping; its best checkpoint is that of step 20.
END_STEP_SCRIPT = SCRIPT.with_name("end_step_script.py")
END_STEP_TEXT = """
name: prog
program: {command: [python, train.py]}
checkpoint: {every_steps: 7, keep: 2, best: {metric: distance, mode: min}}
early_stopping: {metric: distance, mode: min, patience: 2}
logging: {csv: true}
"""


def write_program(folder: Path, text: str = TEXT, script: Path = SCRIPT) -> Path:
    """Write the script and the experiment file into a new folder of code; return the file."""
    code = folder / "code"
    code.mkdir(parents=True, exist_ok=True)
    shutil.copy(script, code / "train.py")
    file = code / "exp.yaml"
    file.write_text(text)
    return file


def forked(
    code: Path, script: str = "train.py", door: str | None = None, launch: Sequence[str] = ()
) -> list[str]:
    """Return overrides with which the script in ``code`` is forked, so that it need not import torch.

    ``door``: of a server that has imported more, by default pytest's own. ``launch``: a command that starts
    the script.
    """
    shutil.copy(HELD, code)
    door = door or warm.for_jobs().get(warm.DOOR)
    command = f"program.command={json.dumps([*launch, *warm.task(HELD.name, script)])}"
    variables = {warm.DOOR: door, "MUST_BE_FORKED": "yes"} if door else {}
    return [command, *(f"program.env.{name}={value}" for name, value in variables.items())]


def stopped_at(step: int, folder: Path, *words: str, code: Path) -> RunPaths:
    """Submit from ``code`` with runs below ``folder``; Ctrl-C after ``step``. Return the run that it ends."""
    process = start("submit", *words, "--local", cwd=code, HPC_TRAIN_RUNS=str(folder / "runs"))
    wait_for(lambda: any(folder.glob("runs/*/*/metrics.jsonl")), "metrics")
    wait_for(lambda: last_step(only_run(folder)) >= step, f"step {step}")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG_LIMIT_S)
    paths = only_run(folder)
    assert status(paths)["state"] == "interrupted" and status(paths)["step"] >= step
    return paths


def resumed_and_quiet(
    step: int, folder: Path, *words: str, code: Path, pace: str
) -> tuple[int, RunPaths, RunPaths]:
    """Submit twice, once disturbed by Ctrl-C after ``step``, slowed by ``pace``, and resumed.

    Return the step at which it was stopped, this run, and the one that nothing disturbed.
    """
    paths = stopped_at(step, folder, *words, pace, code=code)
    stopped = int(status(paths)["step"])
    resume(paths)
    done = hpc_train("submit", *words, "--local", cwd=code, HPC_TRAIN_RUNS=str(folder / "runs"))
    assert done.code == 0, done.err
    (quiet,) = (run for run in found_runs(folder) if run.folder != paths.folder)
    verified = hpc_train("verify", paths.folder)
    assert verified.code == 0, verified.err
    return stopped, paths, quiet


def send(folder: Path, attempt: int, *messages: Any) -> Path:
    """Replace the messages of rank 0's session in an attempt of the run in ``folder``; return their file."""
    file = RunPaths(folder).attempt(attempt).session(0)
    file.write_text("".join(json.dumps(message) + "\n" for message in messages))
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


def final_weights(paths: RunPaths) -> dict[str, Any]:
    """Return the weights that ``SESSION_SCRIPT`` wrote at its end."""
    state = torch.load(paths.work / "weights.pt")
    return {name: value.tolist() for name, value in state.items()}


#: Starts two ranks on each node.
TORCHRUN = (
    "torchrun", "--nnodes={nodes}", "--node-rank={node_rank}", "--nproc-per-node=2",
    "--master-addr={master_addr}", "--master-port={master_port}",
)  # fmt: skip
#: The same script with torchrun, which is started once per node and starts the ranks.
TORCHRUN_TEXT = f"""
name: prog
program:
  command: {json.dumps([*TORCHRUN, "train.py"])}
  per: node
  args: {{steps: 30}}
"""


def program_metrics(
    folder: Path, attempt: int = 1, jsonl: str | None = None, regex: str | None = None, **sections: Any
) -> ProgramMetrics:
    """Return the metrics of a program; ``jsonl`` and ``regex``: keys of ``program.metrics``."""
    keys = {name: text for name, text in (("jsonl", jsonl), ("regex", regex)) if text}
    program = {"command": ["python"], **({"metrics": keys} if keys else {})}
    job = Program.model_validate({"name": "prog", "program": program, **sections})
    (folder / "attempts" / str(attempt)).mkdir(parents=True, exist_ok=True)
    return ProgramMetrics(job, RunPaths(folder), attempt, folder)
