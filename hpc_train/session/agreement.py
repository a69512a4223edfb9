"""Combines the flags of the ranks of a program: through shared memory on one node, else over a gloo group."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from hpc_train.training.distributed.shared_flags import SharedFlags, open_shared_flags

#: Longer than rank 0 evaluates alone. The watchdog ends a hang earlier.
_LIMIT = timedelta(days=7)
#: Number of different flags.
_NUM_FLAGS = 4


class Agreement:
    """``begin`` and ``wait`` are collective and alternate; ``wait`` without ``begin`` returns 0."""

    def __init__(self, rank: int, ranks: int) -> None:
        if not dist.is_initialized():
            raise RuntimeError("session: initialize torch.distributed first: ranks must agree")
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=_LIMIT))
        self._shared: SharedFlags | None = None
        if os.environ.get("LOCAL_WORLD_SIZE") == str(ranks):
            self._shared = open_shared_flags(rank, ranks, self._group, math.inf)
        self._counts = torch.zeros(_NUM_FLAGS, dtype=torch.int64)
        self._work: dist.Work | None = None
        self._has_begun = False

    def begin(self, flags: int) -> None:
        """Publish this rank's flags, one bit each, without waiting for others."""
        self._has_begun = True
        if self._shared is not None:
            self._shared.write(flags)
            return
        self._counts = torch.tensor([flags >> place & 1 for place in range(_NUM_FLAGS)])
        self._work = dist.all_reduce(self._counts, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def wait(self) -> int:
        """Return the flags that any rank has set."""
        if not self._has_begun:
            return 0
        self._has_begun = False
        if self._shared is not None:
            flags = 0
            for number in self._shared.wait():
                flags |= number
            return flags
        assert self._work is not None
        self._work.wait()
        return sum(int(count) << place for place, count in enumerate(self._counts.tolist()))
