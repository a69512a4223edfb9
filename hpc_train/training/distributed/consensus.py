"""Decisions of all ranks at each step: to stop, to save, and how to handle an error of one rank."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpc_train.rank.signals import StopFlag
from hpc_train.training.distributed.process_group import Group
from hpc_train.training.distributed.shared_flags import NUM_BITS


@dataclass(frozen=True)
class StepFlags:
    """One rank's flags at the start of a step. ``Agreement`` adds the stop flag."""

    #: A save is due by this rank's clock; only rank 0's counts.
    save: bool = False
    #: Its last save has failed.
    has_failed: bool = False
    #: Its data for the next step have not arrived yet.
    is_waiting: bool = False
    #: It has computed a loss that is NaN or infinite.
    is_non_finite: bool = False
    #: Bad samples that it has read in this attempt.
    bad_samples: int = 0


@dataclass(frozen=True)
class Consensus(StepFlags):
    """The combined flags: True if any rank's flag is; ``bad_samples`` is the sum over ranks."""

    stop: bool = False

    @property
    def needs_check(self) -> bool:
        """Whether a rank has a fault that may end the attempt."""
        return self.has_failed or self.is_non_finite or self.bad_samples > 0


#: The result of nearly all steps.
_NOTHING = Consensus()
#: Number of flags among a rank's numbers, one bit each; the bad samples follow.
_NUM_FLAGS = 5
_MOST_BAD_SAMPLES = (1 << NUM_BITS - _NUM_FLAGS) - 1


def _packed(numbers: Sequence[int]) -> int:
    """Return flags and bad samples as one number below 2 ** NUM_BITS."""
    flags, bad_samples = numbers[:_NUM_FLAGS], min(numbers[_NUM_FLAGS], _MOST_BAD_SAMPLES)
    return sum(bool(flag) << place for place, flag in enumerate(flags)) | bad_samples << _NUM_FLAGS


def _total(numbers: Sequence[int]) -> tuple[int, ...]:
    """Return the flags that any rank has set, and the sum of bad samples."""
    flags = functools.reduce(operator.or_, numbers)
    bad_samples = sum(number >> _NUM_FLAGS for number in numbers)
    return (*(flags >> place & 1 for place in range(_NUM_FLAGS)), bad_samples)


class Agreement:
    """Combines the ranks' flags: contributed at the start of a step, combined at its end.

    The exchange runs on the CPU, concurrently with the step: in shared memory if all ranks are on one node
    (``distributed.shared_flags``), else as a sum over the control group. All methods but the constructor are
    collective. A dead peer raises quickly, a silent one after the group's timeout.
    """

    def __init__(self, group: Group, flag: StopFlag) -> None:
        self._group = group
        self._flag = flag
        self._counts = torch.zeros(6, dtype=torch.int64)
        #: The same memory; accessing it is faster than a tensor operation.
        self._array = self._counts.numpy()
        self._work: dist.Work | None = None
        #: This rank's numbers, from ``begin`` to ``wait``.
        self._own: tuple[int, ...] | None = None

    def begin(self, flags: StepFlags = StepFlags()) -> None:
        """Start the exchange."""
        assert self._own is None, "begin without wait"
        saves = flags.save and self._group.rank == 0
        bits = (bool(self._flag), saves, flags.has_failed, flags.is_waiting, flags.is_non_finite)
        self._own = (*bits, flags.bad_samples)
        if self._group.shared_flags is not None:
            self._group.shared_flags.write(_packed(self._own))
        elif self._group.world_size > 1:
            self._array[:] = self._own  # summed: a flag that any rank has set is above zero
            self._work = dist.all_reduce(self._counts, group=self._group.control, async_op=True)

    def wait(self) -> Consensus:
        """End the exchange; returns the same on all ranks."""
        assert self._own is not None, "wait without begin"
        counts, self._own = self._own, None
        if self._group.shared_flags is not None:
            counts = _total(self._group.shared_flags.wait())
        elif self._work is not None:
            work, self._work = self._work, None
            work.wait()
            counts = self._array.tolist()
        elif self._flag:  # single rank: a signal since begin counts, too
            counts = (1, *counts[1:])
        if not any(counts):
            return _NOTHING
        stop, save, has_failed, is_waiting, is_non_finite, bad_samples = counts
        return Consensus(save > 0, has_failed > 0, is_waiting > 0, is_non_finite > 0, bad_samples, stop > 0)

    def exchange(self, flags: StepFlags = StepFlags()) -> Consensus:
        """Begin and wait, if there is nothing to overlap with."""
        self.begin(flags)
        return self.wait()

    def rank_0_says(self, value: int) -> int:
        """Return rank 0's ``value`` on every rank."""
        if self._group.world_size == 1:
            return value
        tensor = torch.tensor([int(value)], dtype=torch.int64)
        dist.broadcast(tensor, src=0, group=self._group.control)
        return int(tensor.item())
