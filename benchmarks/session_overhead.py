"""The time of a step of a user's own script with ``hpc_train.session`` and the launcher, and without both.

    python -m benchmarks.session_overhead [--rounds 7] [--ranks 1 2] [--quick]

The script trains the tiny MLP of benchmarks/step.py in plain PyTorch, on one rank and on two ranks (gloo,
DistributedDataParallel), with one thread each. With the session it is a run of ``hpc-train submit --local``:
after each step it calls ``log``, ``progress`` and ``should_stop``; nothing is saved. Without, torchrun starts
the two ranks. The arms of a round take turns (``benchmarks.turns``), so that both run under the same load of
the machine; an arm's time is the median of windows of steps after a warm-up.
Writes benchmarks/results/session_overhead.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.arms import environment, printed, under_torchrun
from benchmarks.loops import WORKLOADS, Workload, differences, loss_of
from benchmarks.measuring import comparison, conditions, parser, report, rounds_of
from benchmarks.turns import by_turns, undisturbed

PLAIN, SESSION = "plain script", "with session"
EXPERIMENT = """\
name: overhead
program: {{command: [python, -m, benchmarks.session_overhead, {words}]}}
"""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--script", nargs=3, metavar=("ARM", "WORKLOAD", "FILE"), help=argparse.SUPPRESS)
    options.add_argument("--ranks", nargs="+", type=int, choices=[1, 2], default=[1, 2])
    arguments = options.parse_args()
    if arguments.script:
        arm, name, file = arguments.script
        train(_workload(name, quick=arguments.quick), Path(file), uses_session=arm == "session")
        return
    for name in ("mlp", "mlp_ddp")[min(arguments.ranks) - 1 : max(arguments.ranks)]:
        workload = _workload(name, quick=arguments.quick)
        arms = {
            PLAIN: functools.partial(_plain, name, workload, quick=arguments.quick),
            SESSION: functools.partial(_with_session, name, workload, quick=arguments.quick),
        }
        rounds = [by_turns(arms, workload.turn_s) for _ in range(rounds_of(arguments))]
        values = {arm: [round_[arm] for round_ in rounds] for arm in arms}
        ranks = "1 rank" if workload.ranks == 1 else f"{workload.ranks} ranks"
        compared = comparison(f"Step of a user's script, mlp, {ranks}", "seconds per step", values, PLAIN)
        compared["turn_s"] = workload.turn_s
        report("session_overhead", arguments, conditions() | {"ranks": workload.ranks}, [compared])


def _workload(name: str, *, quick: bool) -> Workload:
    return WORKLOADS[name].quick() if quick else WORKLOADS[name]


def _words(arm: str, name: str, file: Path, *, quick: bool) -> list[str]:
    return ["--script", arm, name, str(file), *(["--quick"] if quick else [])]


def _plain(name: str, workload: Workload, *, quick: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        words = ["-m", "benchmarks.session_overhead", *_words("plain", name, file, quick=quick)]
        printed(under_torchrun(workload.ranks, words), environment(None))
        return _seconds(file, workload)


def _with_session(name: str, workload: Workload, *, quick: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        times, experiment = Path(folder) / "times.json", Path(folder) / "overhead.yaml"
        words = ", ".join(json.dumps(word) for word in _words("session", name, times, quick=quick))
        experiment.write_text(EXPERIMENT.format(words=words), encoding="utf-8")
        submit = ["-m", "hpc_train", "submit", str(experiment), "--local", "--devices", str(workload.ranks)]
        printed([sys.executable, *submit], {**environment(None), "HPC_TRAIN_RUNS": folder})
        return _seconds(times, workload)


def _seconds(file: Path, workload: Workload) -> float:
    times = json.loads(file.read_text(encoding="utf-8"))
    return undisturbed(
        differences(times[workload.warm_up :], workload.window), workload.window, workload.turn_s
    )


def train(workload: Workload, file: Path, *, uses_session: bool) -> None:
    """Train as a user's script does; rank 0 writes when each window of steps began."""
    from hpc_train import session

    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, targets = workload.data()
    model: nn.Module = workload.model()
    if workload.ranks > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.lr)
    rank, batch = int(os.environ.get("RANK", "0")), workload.global_batch_size // workload.ranks
    times: list[float] = []
    for step in range(workload.steps() + 1):
        if step % workload.window == 0:
            times.append(time.time())
        start = (step * workload.ranks + rank) * batch % (len(images) - batch)
        loss = loss_of(model(workload.prepare(images[start : start + batch])), targets[start : start + batch])
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        if uses_session:
            session.log(step + 1, loss=value)
            session.progress(step + 1, workload.steps() + 1)
            if session.should_stop(step + 1):
                break
    if rank == 0:
        file.write_text(json.dumps(times), encoding="utf-8")
    if dist.is_initialized():
        dist.barrier()  # torch 2.15 sometimes aborts a rank whose peer has left
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
