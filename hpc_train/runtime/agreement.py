"""What all ranks decide together at each step: to stop, to save."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hpc_train.runtime.process_group import Group
from hpc_train.runtime.signals import StopFlag

#: Bits of what ``wait`` returns.
STOP, SAVE = 1, 2


class Agreement:
    """Ranks say at a step's start what they want; at its end all know the same.

    The exchange runs on the CPU beside the step. All methods but the constructor are collective. A dead peer
    raises within moments, a silent one after the group's timeout.
    """

    def __init__(self, group: Group, flag: StopFlag) -> None:
        self._group = group
        self._flag = flag
        self._wishes = torch.zeros(2, dtype=torch.int32)
        self._work: dist.Work | None = None
        self._save = False

    def begin(self, *, save: bool = False) -> None:
        """Start the exchange. ``save``: a save is due by this rank's clock; only rank 0's counts."""
        assert self._work is None, "begin without wait"
        self._save = save and self._group.rank == 0
        if self._group.world_size == 1:
            return
        # One number a bit: the maximum of a mask would drop the lower bit of another rank.
        self._wishes[0], self._wishes[1] = int(bool(self._flag)), int(self._save)
        self._work = dist.all_reduce(
            self._wishes, op=dist.ReduceOp.MAX, group=self._group.control, async_op=True
        )

    def wait(self) -> int:
        """End the exchange; return the bits ``STOP`` and ``SAVE``, the same on all ranks."""
        if self._group.world_size == 1:
            return STOP * bool(self._flag) | SAVE * self._save
        assert self._work is not None, "wait without begin"
        work, self._work = self._work, None
        work.wait()
        stop, save = self._wishes.tolist()
        return STOP * stop | SAVE * save

    def poll(self) -> bool:
        """Tell whether any rank was asked to stop; for loops other than the training steps."""
        self.begin()
        return bool(self.wait() & STOP)

    def rank_0_says(self, value: bool) -> bool:
        """Return rank 0's ``value`` on every rank."""
        if self._group.world_size == 1:
            return value
        said = torch.tensor([int(value)], dtype=torch.int32)
        dist.broadcast(said, src=0, group=self._group.control)
        return bool(said.item())
