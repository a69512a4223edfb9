"""Seeded random faults on runs of a real Slurm, several at a time: ``… -m tests.faults.soak --seeds 1-100``.

Starts a cluster of its own. Prints a line per seed; exit code 1 if a run did not end as the uninterrupted
run, did not restart as it should, or left a process or a file in /dev/shm: its folder is kept then. A seed's
result is added to benchmarks/results/soak.json, so a soak can be stopped and continued with the other seeds.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from hpc_train.paths import RunPaths
from hpc_train.run.attempts import AttemptRecord
from hpc_train.run.checkpoints import committed
from tests import warm
from tests.end_to_end.runs import assert_equal_to_the_bit, rows
from tests.faults.driver import assert_whole, complete, strike
from tests.faults.faults import Fault, Kill, KillNode
from tests.faults.local import EXPERIMENT
from tests.faults.on_slurm import SlurmRun
from tests.faults.results import failed_results
from tests.faults.runs import wait
from tests.faults.schedule import Frame, Schedule, parse_seeds
from tests.quiet import QuietRuns
from tests.slurm import processes
from tests.slurm.cluster import REPOSITORY, Cluster, running
from tests.slurm.configuration import Settings
from tests.slurm.experiments import ENVIRONMENT, ranks_of, records, standby_files
from tests.slurm.host import program_path
from tests.waiting import came_true

RESULTS = REPOSITORY / "benchmarks" / "results" / "soak.json"
_NAMES = REPOSITORY / ".pytest_cache" / "hpc-train"
_SHM = Path("/dev/shm")
_NUM_NODES = 8
#: Each of a step's micro-batches takes so much longer, so that a run is not over before its faults strike.
_PACE_S = 0.02
_LAST_STRIKE = 28
_LEAVE_S = 60.0
_MAX_CRASHES, _MAX_PREEMPTIONS, _MAX_WITHOUT_PROGRESS = 100, 50, 100
PROGRAM = """\
name: counting
program: {command: [python, tests/faults/counting.py]}
recovery: {max_crashes: 100, max_without_progress: 100, exclude_nodes_for_h: 0}
"""


@dataclass(frozen=True)
class Shape:
    """The run of a seed, and how its job restarts."""

    #: ``program``: tests/faults/counting.py, without torch.
    strategy: str
    nodes: int
    ranks_per_node: int
    spare_nodes: int
    standby: bool
    restart: str
    #: Loader processes per rank.
    workers: int
    #: Ranks start as a user's do; others are forked (tests/warm.py).
    fresh: bool

    @classmethod
    def of(cls, random: Random) -> Shape:
        strategy = random.choices(["ddp", "fsdp", "program"], [45, 45, 10])[0]
        nodes, ranks = random.choices([(1, 2), (2, 1), (2, 2)], [30, 55, 15])[0]
        standby = random.random() < 0.12
        shape = cls(
            strategy=strategy,
            nodes=nodes,
            ranks_per_node=ranks,
            spare_nodes=int(random.random() < 0.4),
            standby=standby,
            restart=random.choice(["auto", "in_place"]),
            workers=int(random.random() < 0.3),
            fresh=standby or random.random() < 0.08,
        )
        if strategy == "program":
            shape = replace(shape, nodes=1, ranks_per_node=1, standby=False, workers=0, fresh=False)
        return shape

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def text(self) -> str:
        return PROGRAM if self.strategy == "program" else EXPERIMENT

    def reference(self, quiet_runs: QuietRuns) -> RunPaths:
        """Return the uninterrupted run, which is the same for any number of nodes and loader processes."""
        parallel = [] if self.strategy == "program" else [f"parallel.strategy={self.strategy}"]
        return quiet_runs.of(*parallel, text=self.text, ranks=self.ranks, environment=ENVIRONMENT)

    def overrides(self, name: str) -> list[str]:
        slurm = f"partition: low, nodes: {self.nodes}, ranks_per_node: {self.ranks_per_node}, time_limit: 2h"
        slurm += f", spare_nodes: {self.spare_nodes}, signal_lead_s: 30, extra: {{exclusive: true}}"
        words = [f"name={name}", f"slurm={{{slurm}}}", f"recovery.restart={self.restart}"]
        words += [f"recovery.max_preemptions={_MAX_PREEMPTIONS}"]
        if self.strategy != "program":
            words += [f"parallel.strategy={self.strategy}", f"data.workers={self.workers}"]
        return [*words, "recovery.standby=true"] if self.standby else words

    def stays(self, fault: Fault, ended: Sequence[AttemptRecord]) -> bool | None:
        """Return True if the attempt after the last of ``ended`` must begin in the same allocation; None if
        it depends on when Slurm notices.
        """
        if isinstance(fault, KillNode):
            # The first node has the batch script. Ranks of a node without daemons may go on for a while.
            has_lost_one = len(ended[-1].hosts) + len(ended[-1].spare_hosts) < self.nodes + self.spare_nodes
            if not self.spare_nodes or has_lost_one or fault.node == 0:
                return False
            return True if fault.with_ranks else None
        if not isinstance(fault, Kill):
            return False
        if self.restart == "in_place":
            return True
        quick = [record.cause in _CRASHES and not _has_progressed(record) for record in ended[-2:]]
        return quick != [True, True]


_CRASHES = {"crash", "hang", "bad node"}


def _has_progressed(record: AttemptRecord) -> bool:
    began = max((int(name.removeprefix("step-")) for name in record.checkpoints), default=0)
    return record.saved_step is not None and record.saved_step > began


@dataclass(frozen=True)
class Result:
    """The result of a seed. ``error`` is empty if its run equals the uninterrupted one and all else holds."""

    seed: int
    shape: Shape
    faults: list[str]
    attempts: list[str]
    in_place: list[bool]
    seconds: float
    error: str = ""

    def line(self) -> str:
        end = f"differs: {self.error.splitlines()[0]}" if self.error else "equal"
        shape = f"{self.shape.strategy} on {self.shape.nodes}+{self.shape.spare_nodes}"
        faults = f"{', '.join(self.faults)}; {sum(self.in_place)} in place"
        return f"seed {self.seed}: {shape}: {faults}: {self.seconds:.0f} s: {end}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"equal": not self.error}


class NodePool:
    """The cluster's nodes, each for one run at a time: what preempts a run must not hit another."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, count: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._free >= count)
            self._free -= count
        try:
            yield
        finally:
            with self._changed:
                self._free += count
                self._changed.notify_all()


@dataclass
class Soak:
    """One soak's cluster, runs and results. ``owns_shm``: nobody else has files in /dev/shm."""

    cluster: Cluster
    folder: Path
    owns_shm: bool = False
    nodes: NodePool = field(default_factory=lambda: NodePool(_NUM_NODES))

    def __post_init__(self) -> None:
        self._quiet = QuietRuns(self.folder / "quiet-runs")

    def seed(self, seed: int) -> Result:
        """Run a seed to its end. Never raises."""
        shape = Shape.of(Random(f"soak {seed}"))
        frame = Frame(shape.ranks, shape.nodes, first=2, last=_LAST_STRIKE)
        faults = Schedule.of(seed, "soak", frame).faults
        folder, error, run = self.folder / f"seed-{seed}", "", None
        # One more while a node is dead.
        needed = shape.nodes + shape.spare_nodes + any(isinstance(fault, KillNode) for fault in faults)
        with self.nodes.taken(needed):
            began = time.monotonic()
            try:
                quiet = shape.reference(self._quiet)
                run = SlurmRun(
                    self.cluster,
                    folder,
                    shape.text,
                    *shape.overrides(f"soak-{seed}"),
                    pace_s=_PACE_S,
                    runs=self.folder / "runs",  # one for all, so that they share one snapshot of the code
                    environment={} if shape.fresh else warm.for_jobs(),
                )
                self._survive(run, shape, faults, quiet)
            except Exception as failure:
                error = str(failure) or type(failure).__name__
                if run is not None:
                    self.cluster.run("scancel", f"--name={run.paths.folder.parent.name}", check=False)
        attempts = records(run.paths) if run else []
        names = [f"{fault.title} at {fault.step}" for fault in faults]
        causes, in_place = (
            [str(record.cause) for record in attempts],
            [record.in_place for record in attempts],
        )
        seconds = round(time.monotonic() - began, 1)
        result = Result(seed, shape, names, causes, in_place, seconds, error)
        if run is not None and not error:
            shutil.rmtree(run.paths.folder, ignore_errors=True)
        return result

    def _survive(self, run: SlurmRun, shape: Shape, faults: Sequence[Fault], quiet: RunPaths) -> None:
        """Let each fault strike, see the run complete, check all that it promises. Raises AssertionError."""
        for fault in faults:
            strike(run, fault, ready=lambda: wait_for_standby(run, shape))
            assert_ranks_are_gone(run, fault)
        complete(run)
        assert_whole(
            run, quiet, assert_same_program if shape.strategy == "program" else assert_equal_to_the_bit
        )
        assert_attempts(run, shape, faults)
        if self.owns_shm:
            assert_shm_is_empty()

    def assert_nothing_is_left(self) -> None:
        """Raise AssertionError for processes of jobs, once all runs have ended."""

        def left() -> list[int]:
            return processes.of_jobs(self.cluster.conf)

        assert came_true(lambda: not left(), _LEAVE_S), f"processes of jobs are left: {left()}"


def wait_for_standby(run: SlurmRun, shape: Shape) -> None:
    """Wait until the ranks of the next attempt are on standby, if the run has such."""

    def count() -> int:
        # A start that Slurm has killed leaves files of an earlier attempt.
        folder_end = f"-{run.attempt() + 1}"
        return sum(file.parent.name.endswith(folder_end) for file in standby_files(run.paths))

    if shape.standby:
        wait(lambda: count() == shape.ranks, lambda: f"standby\n{run.account()}")


def assert_ranks_are_gone(run: SlurmRun, fault: Fault) -> None:
    """Raise AssertionError if ranks of an attempt live on beside those of the next.

    Those of a node whose daemons died end once they notice.
    """

    def left() -> list[int]:
        return [pid for number in range(1, run.attempt()) for pid in ranks_of(run.paths, attempt=number)]

    may_linger = isinstance(fault, KillNode) and not fault.with_ranks
    assert came_true(lambda: not left(), _LEAVE_S if may_linger else 0.0), (
        f"ranks of an earlier attempt live: {left()}\n{run.account()}"
    )


def assert_same_program(quiet: RunPaths, run: RunPaths) -> None:
    """Raise AssertionError if two runs of the program differ in metrics or in the newest checkpoint."""
    assert rows(quiet) == rows(run)
    ours, theirs = (committed(paths)[0].folder / "state.txt" for paths in (quiet, run))
    assert ours.read_bytes() == theirs.read_bytes(), f"{theirs} differs"


def assert_attempts(run: SlurmRun, shape: Shape, faults: Sequence[Fault]) -> None:
    """Raise AssertionError if an attempt ended for another reason than its fault, if the next one began in
    another allocation than it should, or if the budgets do not count these ends.
    """
    attempts = records(run.paths)
    causes = [record.cause for record in attempts]
    assert len(attempts) == len(faults) + 1 and causes[-1] == "completed", f"{causes}\n{run.account()}"
    counts: Counter[str] = Counter()
    for number, fault in enumerate(faults):
        ended, begun = attempts[number : number + 2]
        assert ended.cause in fault.causes, f"{ended.cause} after {fault}\n{run.account()}"
        stays = shape.stays(fault, attempts[: number + 1])
        assert stays in {None, begun.in_place}, f"in place: {begun.in_place} after {fault}\n{run.account()}"
        starts = (ended.restart or 0) + (not begun.in_place)
        assert (begun.job, begun.restart) == (ended.job, starts), f"{begun}\n{run.account()}"
        if shape.standby and isinstance(fault, Kill) and begun.in_place:
            log = run.paths.attempt(begun.attempt).log(0).read_text()
            assert "which was on standby" in log, f"attempt {begun.attempt} began in fresh ranks\n{log}"
        kind = "crash" if ended.cause in _CRASHES else "preemption"
        if kind == "crash" or ended.cause in {"preemption", "time limit"}:
            counts[kind] += 1
            most = _MAX_CRASHES if kind == "crash" else _MAX_PREEMPTIONS
            assert f"{kind} {counts[kind]} of {most}: " in str(ended.reason), f"{ended}\n{run.account()}"
    left = {
        "crashes_left": _MAX_CRASHES - counts["crash"],
        "preemptions_left": _MAX_PREEMPTIONS - counts["preemption"],
        "without_progress_left": _MAX_WITHOUT_PROGRESS,
    }
    assert (found := run.standing()["budget"]) == left, f"{found} rather than {left} after {causes}"


def assert_shm_is_empty() -> None:
    """Raise AssertionError for files in /dev/shm that no living process has open or mapped."""
    # A file has a name for a moment before its maker has opened it again, or removed the name.
    assert came_true(lambda: not left_in_shm(), 2.0), f"left in /dev/shm: {left_in_shm()}"


def left_in_shm() -> list[str]:
    names = {entry.name for entry in _SHM.iterdir()}
    for entry in Path("/proc").iterdir() if names else []:
        with suppress(OSError):
            if entry.name.isdigit():
                held = [link.readlink().name for link in (entry / "fd").iterdir()]
                maps = (entry / "maps").read_text(errors="replace")
                names -= {*held, *(name for name in names if f"{_SHM}/{name}" in maps)}
    return sorted(names)


def own_shm() -> None:
    """Mount an empty /dev/shm that only this process and its descendants see. Call it before any thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, recursive, private = 0x20000, 0x4000, 0x40000  # CLONE_NEWNS, MS_REC, MS_PRIVATE
    if libc.unshare(new_mounts) or libc.mount(None, b"/", None, recursive | private, None):
        raise OSError(ctypes.get_errno(), "no mounts of its own")
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(_SHM)], check=True)


def soak(
    seeds: Sequence[int], parallel: int, results: Path | None = None, *, owns_shm: bool = False
) -> list[Result]:
    """Run all seeds; return those whose run differs, in no order. Prints a line per seed.

    Raises AssertionError if processes or files in /dev/shm are left at the end.
    """
    os.environ.setdefault("HPC_TRAIN_CACHE", str(_NAMES))
    os.environ.setdefault("HPC_TRAIN_NO_MEMORY", "1")
    folder = Path(tempfile.mkdtemp(prefix="hpc-train-soak-"))
    # With accounting: without it Slurm up to 24.05 refuses any change of a job that has outlived one of its
    # nodes, such as of its time limit, since slurmctld waits for a new index in the database.
    with running(Settings(num_nodes=_NUM_NODES)) as cluster, ThreadPoolExecutor(parallel) as pool:
        running_soak = Soak(cluster, folder, owns_shm)
        futures = [pool.submit(running_soak.seed, seed) for seed in seeds]
        failed = failed_results((future.result() for future in as_completed(futures)), folder, results, facts)
        running_soak.assert_nothing_is_left()
    if owns_shm:
        assert_shm_is_empty()
    if not failed:
        shutil.rmtree(folder)
    return failed


def facts(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the version of Slurm, and counts of the runs."""
    slurm = subprocess.run(
        [program_path("slurmctld"), "-V"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {"slurm": slurm, "seeds": len(runs), "equal": sum(run["equal"] for run in runs)}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Seeded random faults on a real Slurm.")
    parser.add_argument(
        "--seeds", type=parse_seeds, required=True, help="a-b or a, both included, with commas"
    )
    parser.add_argument("--parallel", type=int, default=4, help="runs at a time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args(words)
    own_shm()
    try:
        failed = soak(arguments.seeds, arguments.parallel, arguments.results, owns_shm=True)
    finally:
        warm.close()
    print(f"{len(arguments.seeds) - len(failed)} of {len(arguments.seeds)} bitwise identical", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
