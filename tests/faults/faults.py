"""Faults as data: what strikes a run, at which step, and how the attempt may end then.

``strike`` causes it and returns its cure: what to do after the attempt, before the run continues.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from tests.disks import take_room
from tests.faults.on_slurm import SlurmRun
from tests.faults.runs import LocalRun, Run, signal_to, wait
from tests.faults.shim import ALWAYS, EVERY_TOUCH, TAKES_ROOM, Touch

Cure: TypeAlias = Callable[[], None]
#: A run that survives a refused write is seen to have done so after this many more steps.
STEPS_AFTER = 5


def nothing() -> None:
    """Cure what needs none."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong when the running attempt has done ``step`` steps."""

    step: int

    #: What the local command may exit with.
    codes: ClassVar[set[int]] = set()
    #: What the attempt's record may give as the cause; the local launcher may give none.
    causes: ClassVar[set[str]] = set()
    #: The attempt's reason holds this.
    reason: ClassVar[str] = ""
    #: False where the attempt may, or does, continue.
    ends: ClassVar[bool] = True
    #: On Slurm too the run continues only by ``resume``.
    is_final: ClassVar[bool] = False
    #: All ranks are asked to stop, some time after ``strike``.
    asks_all: ClassVar[bool] = False

    @property
    def title(self) -> str:
        """A few words for a table of faults."""
        return type(self).__name__

    def strike(self, run: Run) -> Cure:
        raise NotImplementedError

    def is_past(self, run: Run) -> bool:
        """Return True if a fault that leaves the attempt alive has struck."""
        return True


@dataclass(frozen=True)
class Signals(Fault):
    """Signals to one rank or all (``rank`` None), one right after the other."""

    numbers: tuple[signal.Signals, ...]
    rank: int | None = None

    codes = {75}
    causes = {"preemption", "time limit", "interrupted"}

    def strike(self, run: Run) -> Cure:
        for number in self.numbers:
            for rank, pid in run.ranks().items():
                if self.rank in (None, rank):
                    signal_to(pid, number)
        return nothing


@dataclass(frozen=True)
class Interrupt(Fault):
    """Ctrl-C to the local launcher."""

    codes = {130}
    causes = {"interrupted"}
    reason = "stopped by Ctrl-C"
    asks_all = True

    def strike(self, run: LocalRun) -> Cure:
        signal_to(run.process.pid, signal.SIGINT)
        return nothing


@dataclass(frozen=True)
class Kill(Fault):
    """SIGKILL to some ranks, one after the other without a pause."""

    ranks: tuple[int, ...]

    codes = {1}
    causes = {"crash"}
    reason = "ill"

    def strike(self, run: Run) -> Cure:
        pids = run.ranks()
        for rank in self.ranks:
            if rank in pids:
                signal_to(pids[rank], signal.SIGKILL)
        return nothing


@dataclass(frozen=True)
class KillLauncher(Fault):
    """SIGKILL to the local launcher: its ranks die with it."""

    codes = {-signal.SIGKILL}
    causes = {"lost", "interrupted"}

    def strike(self, run: LocalRun) -> Cure:
        ranks = run.ranks()
        assert ranks, "no rank lives"
        run.process.kill()
        wait(lambda: not run.ranks(), "the end of the killed launcher's ranks")
        return nothing


@dataclass(frozen=True)
class Stop(Fault):
    """SIGSTOP of one rank, which is nothing but silence to the others."""

    rank: int

    codes = {1, 75, 79}
    causes = {"hang"}

    @property
    def reason(self) -> str:  # type: ignore[override]
        return f"rank {self.rank}"

    def strike(self, run: Run) -> Cure:
        signal_to(run.ranks()[self.rank], signal.SIGSTOP)
        return nothing


@dataclass(frozen=True)
class KillAtTouch(Fault):
    """SIGKILL of a rank at its ``number``-th touch of the checkpoints' files from now on."""

    rank: int
    number: int

    codes = {1}
    causes = {"crash"}
    reason = "ill"

    def strike(self, run: Run) -> Cure:
        assert run.shim is not None
        run.shim.order(self.rank, self.number, 0, 1, EVERY_TOUCH)
        return run.shim.clear


@dataclass(frozen=True)
class Refusal(Fault):
    """A rank's ``number``-th write of a checkpoint and all after it fail: the disk is full, or the quota."""

    rank: int
    number: int
    error: int

    codes = {74}
    causes = {"user error"}
    is_final = True

    @property
    def reason(self) -> str:  # type: ignore[override]
        return "quota" if self.error == errno.EDQUOT else "the disk is full"

    def strike(self, run: Run) -> Cure:
        assert run.shim is not None
        run.shim.order(self.rank, self.number, self.error, ALWAYS, TAKES_ROOM)
        return run.shim.clear


@dataclass(frozen=True)
class InputOutputError(Fault):
    """One write or fsync fails once: tried again, or the attempt ends and the next one does it."""

    rank: int
    number: int

    codes = {1, 74, 75}
    causes = {"crash", "user error", "interrupted"}
    ends = False

    def strike(self, run: Run) -> Cure:
        assert run.shim is not None
        run.shim.order(self.rank, self.number, errno.EIO, 1, Touch.WRITE | Touch.SYNC)
        return run.shim.clear

    def is_past(self, run: Run) -> bool:
        assert run.shim is not None
        return run.shim.has_struck(self.rank)


@dataclass(frozen=True)
class FullDisk(Fault):
    """The file system of the run has ``leave_bytes`` left, for real. Only for a run on one of its own."""

    leave_bytes: int

    codes = {74}
    causes = {"user error"}
    is_final = True

    def strike(self, run: Run) -> Cure:
        assert os.path.ismount(run.paths.folder.parents[1]), "a disk that others use is not filled"
        ballast = run.paths.folder.parents[1] / "ballast"
        wait(lambda: take_room(ballast, self.leave_bytes), "a full disk")
        return ballast.unlink


@dataclass(frozen=True)
class Preemption(Fault):
    """A job of the higher partition takes the run's nodes."""

    causes = {"preemption"}
    reason = "preempted at step"
    asks_all = True

    def strike(self, run: SlurmRun) -> Cure:
        return run.preempt()


@dataclass(frozen=True)
class Requeue(Fault):
    """``scontrol requeue``, by hand."""

    causes = {"requeue", "lost"}
    asks_all = True

    def strike(self, run: SlurmRun) -> Cure:
        run.requeue()
        return nothing


@dataclass(frozen=True)
class TimeLimit(Fault):
    """The job's time limit is shortened until Slurm's warning comes, and as long as before afterwards."""

    causes = {"time limit"}
    reason = "time limit"
    asks_all = True

    def strike(self, run: SlurmRun) -> Cure:
        return run.shorten_time_limit()


@dataclass(frozen=True)
class KillNode(Fault):
    """The daemons of one of the run's nodes die; ``with_ranks``, as in a power cut, its ranks too.

    ``only_slurmd``: slurmd is stopped as by an administrator, and leaves its step daemons and ranks alone.
    """

    node: int
    with_ranks: bool
    only_slurmd: bool = False

    #: Ranks outlive their daemons, and save when Slurm ends what is left of the job.
    causes = {"lost", "crash", "preemption", "bad node"}

    @property
    def title(self) -> str:
        return "StopSlurmd" if self.only_slurmd else "PowerCut" if self.with_ranks else "KillDaemons"

    @property
    def asks_all(self) -> bool:  # type: ignore[override]
        """Ranks that live on would complete the run before Slurm has noticed."""
        return not self.with_ranks

    def strike(self, run: SlurmRun) -> Cure:
        return run.kill_node(self.node, with_ranks=self.with_ranks, only_slurmd=self.only_slurmd)


@dataclass(frozen=True)
class KillController(Fault):
    """slurmctld is killed, and comes back after some seconds; ranks do not notice."""

    for_s: float

    ends = False

    def strike(self, run: SlurmRun) -> Cure:
        run.cluster.kill("slurmctld")
        time.sleep(self.for_s)
        run.cluster.start("slurmctld")
        return nothing


@dataclass(frozen=True)
class KillWithoutController(Fault):
    """A rank is killed while slurmctld is dead; the batch script's request to come back must wait for it."""

    rank: int
    for_s: float

    causes = {"crash", "lost"}

    def strike(self, run: SlurmRun) -> Cure:
        run.cluster.kill("slurmctld")
        signal_to(run.ranks()[self.rank], signal.SIGKILL)
        time.sleep(self.for_s)
        run.cluster.start("slurmctld")
        return nothing
