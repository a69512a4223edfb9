"""Checks a machine by its ``machine_report``: this machine by a child process, nodes by a launcher's job.

Each check is one function of the report. Only the report's child process imports torch.
"""

from __future__ import annotations

import math
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.errors import shortened
from hpc_train.experiment.plan.devices import described
from hpc_train.launchers.base import Finding, Level
from hpc_train.package_path import answer_in
from hpc_train.paths import runs_root

REPORT = Path(__file__).with_name("machine_report.py")
#: torch's own limit is below: this one is for a machine that does not answer at all.
_LIMIT_S = 180.0
_PYTHON = (3, 11)
#: Assumed: ranks, loader processes and their pipes need several hundred.
_FILES = 1024
#: Assumed: a checkpoint of a typical model does not fit into less.
_FREE_BYTES = 2 * 2**30
#: Packages that ranks import only if the file needs them.
_NEEDED_BY_SOME = {"timm", "torchvision", "submitit", "wandb"}
#: TensorBoard orders event files by second, and a requeue takes five.
_CLOCK_S = 2.0
_NFILES_REMEDY = "raise the soft limit (`ulimit -n {}`) in your shell's start file, or ask the administrators"


@dataclass(frozen=True)
class Machine:
    """The report of a machine."""

    #: For messages: ``this machine``, ``node n1``.
    where: str
    facts: Mapping[str, Any]
    #: The folder of runs.
    runs: Path
    #: Whether a run would use a GPU of it.
    wants_gpu: bool = False
    #: The lead of the login node's clock over that of the file server.
    clock_lead_s: float | None = None
    is_node: bool = False
    #: Bytes that the file's loader processes would read ahead into /dev/shm on one node.
    prefetched_bytes: int | None = None

    def ok(self, check: str, result: str) -> Finding:
        """Return the finding of a passed check."""
        return self.finding(Level.OK, check, result)

    def finding(self, level: Level, check: str, what: str, why: str = "", remedy: str = "") -> Finding:
        """Return a finding on this machine."""
        return Finding(level, f"machine.{check}", f"{self.where}: {what}", self.where, why, remedy)


@contextmanager
def check_folder(runs: Path) -> Iterator[Path]:
    """Make a private folder in the folder of runs; at the end remove it, and also the latter if it is new."""
    has_runs = runs.exists()
    folder = runs / f".doctor-{secrets.token_hex(6)}"
    folder.mkdir(mode=0o700, parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not has_runs:
            with suppress(OSError):  # a run was created meanwhile
                runs.rmdir()


def clock_lead_s(folder: Path) -> float:
    """Return the lead of this machine's clock over that of the folder's file server."""
    path = folder / "clock"
    path.write_bytes(b"x")
    return time.time() - path.stat().st_mtime


def this_machine(*, wants_gpu: bool = False, prefetched_bytes: int | None = None) -> list[Finding]:
    """Return the findings on the machine that runs the command."""
    runs, where = runs_root(), "this machine"
    try:
        with check_folder(runs) as folder:
            done = subprocess.run(
                [sys.executable, str(REPORT), str(folder)], capture_output=True, timeout=_LIMIT_S, check=True
            )
            facts = parsed(done.stdout.decode(errors="replace"))
    except OSError as error:
        return [unusable_runs(where, runs, error.strerror or str(error))]
    except (subprocess.SubprocessError, ValueError) as error:
        problem = f"{where}: Python can't report on it: {shortened(str(error))}"
        effect, remedy = "ranks start with this Python", "reinstall hpc-train into a new environment"
        return [Finding(Level.ERROR, "machine.python", problem, where, effect, remedy)]
    return judged(Machine(where, facts, runs, wants_gpu, None, False, prefetched_bytes))


def parsed(text: str) -> dict[str, Any]:
    """Return the report, a JSON object in one line. Raises ValueError if there is none."""
    report = answer_in(text)
    if report is None:
        raise ValueError("there is no report")
    return report


def judged(machine: Machine) -> list[Finding]:
    """Return the findings of all checks on a machine."""
    return [finding for check in CHECKS for finding in check(machine)]


def unusable_runs(where: str, runs: Path, reason: str) -> Finding:
    """Return that the folder of runs can't be written."""
    return Finding(
        Level.ERROR,
        "machine.runs",
        f"{where}: the folder of runs {runs} can't be written: {reason}",
        where,
        "a run writes its checkpoints, logs and metrics there, from all of its nodes",
        "set HPC_TRAIN_RUNS to a folder on a disk that login node and compute nodes share",
    )


def python_version(machine: Machine) -> Iterator[Finding]:
    """Python is new enough."""
    version = str(machine.facts.get("python"))
    numbers = tuple(int(part) for part in version.split(".") if part.isdecimal())
    if numbers < _PYTHON:
        problem = f"Python {version} is too old; {'.'.join(map(str, _PYTHON))} is needed"
        remedy = "name a newer one as environment.python, or load its module (environment.modules)"
        yield machine.finding(Level.ERROR, "python", problem, "ranks of hpc-train can't start", remedy)
    else:
        yield machine.ok("python", f"Python {version} ({machine.facts.get('executable')})")


def modules(machine: Machine) -> Iterator[Finding]:
    """The packages that ranks import are installed."""
    missing = [str(name) for name in machine.facts.get("missing", ())]
    if missing:
        level, effect = Level.ERROR, "ranks end when they import it"
        if _NEEDED_BY_SOME.issuperset(missing):
            level, effect = Level.WARNING, "ranks of some files import it"
        problem = f"{machine.facts.get('executable')} does not find {', '.join(missing)}"
        remedy = "install hpc-train into an environment that all nodes see, and name its Python as "
        yield machine.finding(level, "modules", problem, effect, f"{remedy}environment.python")


def torch(machine: Machine) -> Iterator[Finding]:
    """Torch can be imported, and sees the GPUs."""
    facts = machine.facts.get("torch") or {}
    if "error" in facts:
        remedy = "reinstall torch for this machine's CUDA driver, or load the modules that it was built with"
        problem = f"torch fails: {facts['error']}"
        yield machine.finding(Level.ERROR, "torch", problem, "ranks import it first", remedy)
    elif facts:
        yield from _gpus(machine, facts)


def _gpus(machine: Machine, facts: Mapping[str, Any]) -> Iterator[Finding]:
    gpus, cuda = [str(name) for name in facts.get("gpus", ())], facts.get("cuda")
    version = f"torch {facts.get('version')}"
    built = f"built for CUDA {cuda}" if cuda else "built without CUDA"
    if hip := facts.get("hip"):
        built = f"built for ROCm {hip} (not tested)"
    if gpus:
        names = ", ".join(map(described, sorted(set(gpus))))
        summary = f"{version}, {built}, NCCL {facts.get('nccl')}; {len(gpus)} GPUs: {names}"
        yield machine.ok("torch", summary)
        return
    if machine.wants_gpu:
        effect = "the file requests GPUs; with device: auto or cuda its ranks end"
        remedy = "install a torch with CUDA: see pytorch.org"
        if cuda:
            remedy = "install a torch that fits the driver (`nvidia-smi` shows its CUDA version)"
        yield machine.finding(Level.ERROR, "gpu", f"{version}, {built}, sees no GPU", effect, remedy)
    else:
        yield machine.ok("torch", f"{version}, {built}, no GPU visible")


def files_limit(machine: Machine) -> Iterator[Finding]:
    """Processes may open enough files."""
    soft, hard = machine.facts.get("nofile") or (None, None)
    if soft is None or soft >= _FILES:
        yield machine.ok("nofile", f"open files per process: {_amount(soft)}")
        return
    problem = f"at most {soft} open files per process (hard limit {_amount(hard)}), fewer than {_FILES}"
    inherited = "; jobs usually inherit the limit of the shell that submits" if not machine.is_node else ""
    effect = f"loader processes and wandb fail with `Too many open files`{inherited}"
    remedy = _NFILES_REMEDY.format(_FILES if hard is None or hard >= _FILES else hard)
    yield machine.finding(Level.WARNING, "nofile", problem, effect, remedy)


def locked_memory(machine: Machine) -> Iterator[Finding]:
    """InfiniBand may lock memory."""
    soft, rdma = (machine.facts.get("memlock") or (None, None))[0], machine.facts.get("rdma") or []
    if soft is None or not rdma:
        yield machine.ok("memlock", f"locked memory: {_amount(soft, 'bytes')}")
        return
    yield machine.finding(
        Level.WARNING,
        "memlock",
        f"at most {soft} bytes of locked memory, with InfiniBand ({', '.join(map(str, rdma))})",
        "between nodes with GPUs NCCL can't register its buffers: ranks end with `ibv_reg_mr failed` or "
        "`Cannot allocate memory`",
        "`ulimit -l unlimited` in the `setup` of a profile; if that is refused, ask the administrators "
        "(LimitMEMLOCK=infinity of slurmd)",
    )


def runs_folder(machine: Machine) -> Iterator[Finding]:
    """The folder of runs can be written and has space."""
    reason = machine.facts.get("folder")
    if reason:
        yield unusable_runs(machine.where, machine.runs, str(reason))
        return
    free = machine.facts.get("free_bytes")
    if isinstance(free, int) and free < _FREE_BYTES:
        problem = f"{free / 2**30:.1f} GiB are free in {machine.runs}"
        effect = "a checkpoint that does not fit ends the run"
        remedy = "free space (`hpc-train clean RUN`), or set HPC_TRAIN_RUNS to another disk"
        yield machine.finding(Level.WARNING, "space", problem, effect, remedy)
    elif isinstance(free, int):
        yield machine.ok("runs", f"{machine.runs} can be written, {free / 2**30:.0f} GiB free")


def shared_memory(machine: Machine) -> Iterator[Finding]:
    """/dev/shm can be used, and is large enough for the batches that loader processes read ahead."""
    facts = machine.facts.get("shm") or {}
    size, needed = facts.get("bytes"), machine.prefetched_bytes
    remedy = "have it mounted writable and larger (`--shm-size` of a container), or write data.workers: 0"
    if "error" in facts:
        problem = f"no file can be made in /dev/shm: {facts['error']}"
        effect = "loader processes can't start, and NCCL needs it on several GPUs"
        yield machine.finding(Level.ERROR, "shm", problem, effect, remedy)
    elif isinstance(size, int) and needed is not None and needed > size:
        problem = f"/dev/shm has {size / 2**20:.0f} MiB; loader processes read {needed / 2**20:.0f} MiB ahead"
        effect = (
            "batches that do not fit are sent through a pipe, which takes longer; NCCL has too little, too"
        )
        remedy = f"{remedy}; fewer data.workers or a smaller micro_batch_size need less"
        yield machine.finding(Level.WARNING, "shm", problem, effect, remedy)
    elif isinstance(size, int):
        yield machine.ok("shm", f"/dev/shm has {size / 2**20:.0f} MiB")


def quota(machine: Machine) -> Iterator[Finding]:
    """The user is not over quota."""
    report = " ".join(str(machine.facts.get("quota") or "").split())
    if report:
        problem, remedy = f"`quota` reports: {shortened(report)}", "remove files, or ask for a larger quota"
        effect = "once the grace period is over nothing can be written, and runs end"
        yield machine.finding(Level.ERROR, "quota", problem, effect, remedy)


def clock(machine: Machine) -> Iterator[Finding]:
    """The clocks of nodes and login node agree."""
    lead = machine.facts.get("clock_lead_s")
    if machine.clock_lead_s is None or not isinstance(lead, int | float) or not math.isfinite(lead):
        return
    skew = lead - machine.clock_lead_s
    if abs(skew) <= _CLOCK_S:
        yield machine.ok("clock", f"its clock differs by {abs(skew):.1f} s from this one's")
        return
    yield machine.finding(
        Level.WARNING,
        "clock",
        f"its clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this machine's",
        "`status` shows wrong times and considers silent runs dead or alive too long, TensorBoard mixes up "
        "attempts, and from five minutes on Slurm's credentials expire",
        "ask the administrators to synchronize the clocks (chrony, ntpd)",
    )


#: In the order in which they are reported.
CHECKS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    python_version, modules, torch, runs_folder, quota, shared_memory, files_limit, locked_memory, clock,
)  # fmt: skip


def _amount(value: int | None, unit: str = "") -> str:
    return "unlimited" if value is None else f"{value} {unit}".rstrip()
