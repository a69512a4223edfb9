"""Limit and requirement of a rank's open files and sockets.

Called by ``training.rank`` before ranks connect: if a rank runs out of file descriptors while it connects,
the others wait for it.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable
from contextlib import suppress

from hpc_train.errors import EnvironmentRefusesError
from hpc_train.rank.env import RankFacts
from hpc_train.run.resource_limits import of_process

#: Measured: 16 to 30, for logs, checkpoints, pipes and gloo's internal files.
_OWN = 48
#: Measured: up to 22 for one training and one evaluation loader process, with batches in transit.
_PER_LOADER = 24
#: Ring neighbours in the control group. Tree neighbours are at most log2(ranks), and one more for each other
#: root (a rank that sends the others its error).
_RING = 2
#: gloo's internal sockets per group of a DeviceMesh axis.
_PER_AXIS = 3
#: Connections of each other rank to rank 0's store.
_STORE_CONNECTIONS = 2


class TooFewFilesError(EnvironmentRefusesError):
    """The operating system's limit of open files is below the number that training needs."""


def raise_limit() -> int:
    """Raise this process's soft limit of open files to the hard limit; return the new limit."""
    soft, hard = of_process(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft


def needed(facts: RankFacts, axes: Iterable[int], loaders: int) -> int:
    """Return the maximum number of files that this rank opens at a time.

    ``axes``: sizes of the axes of a strategy's DeviceMesh. Each has its own group, except that an axis of all
    ranks uses the default group.
    """
    peers = facts.world_size - 1
    # The default group connects all ranks, the control group only ranks that send to each other.
    sockets = peers + min(peers, _RING + 2 * peers.bit_length())
    sockets += sum(_PER_AXIS + (size - 1 if size < facts.world_size else 0) for size in axes)
    if facts.rank == 0:
        sockets += _STORE_CONNECTIONS * peers
    return _OWN + _PER_LOADER * loaders + sockets


def check(facts: RankFacts, axes: Iterable[int], loaders: int, node: str) -> None:
    """Raise this process's limit. Raises TooFewFilesError if the rank needs more."""
    limit, need = raise_limit(), needed(facts, axes, loaders)
    if limit == resource.RLIM_INFINITY or limit >= need:
        return
    raise TooFewFilesError(
        f"ulimit -n: rank {facts.rank} on node {node} may open {limit} files and sockets but needs {need}, "
        f"with world size {facts.world_size} and data.workers {loaders}; raise the hard limit to that "
        f"(`ulimit -Hn {need}` before `hpc-train submit`; on Slurm also LimitNOFILE of slurmd), or start "
        "fewer ranks"
    )
