"""When each rank of a pipeline computes what, for a diagram: the orders of torch.distributed.pipelining.

Forward passes of a stage take 1 unit of time divided by the stages per rank, backward passes twice that.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """A forward or backward pass of one micro-batch through a rank's stage number ``chunk``."""

    rank: int
    chunk: int
    slot: int
    is_backward: bool
    start: float = 0.0
    end: float = 0.0


def timed(schedule: str, *, ranks: int, slots: int, chunks: int) -> list[Operation]:
    """Return all operations of a step, each as early as its rank and the results that it needs allow."""
    waiting = [_order(schedule, rank, ranks, slots, chunks) for rank in range(ranks)]
    free = [0.0] * ranks
    done: dict[tuple[int, int, bool], float] = {}
    found = []
    while any(waiting):
        for rank in range(ranks):
            while waiting[rank] and (ready := _ready(waiting[rank][0], ranks, chunks, done)) is not None:
                each = waiting[rank].pop(0)
                start = max(ready, free[rank])
                free[rank] = start + (2.0 if each.is_backward else 1.0) / chunks
                done[_stage(each, ranks), each.slot, each.is_backward] = free[rank]
                found.append(Operation(rank, each.chunk, each.slot, each.is_backward, start, free[rank]))
    return found


def _stage(operation: Operation, ranks: int) -> int:
    return operation.chunk * ranks + operation.rank


def _ready(
    each: Operation, ranks: int, chunks: int, done: dict[tuple[int, int, bool], float]
) -> float | None:
    """Return when its input is there, None if it has not been computed yet."""
    stage, slot = _stage(each, ranks), each.slot
    if not each.is_backward:
        return 0.0 if stage == 0 else done.get((stage - 1, slot, False))
    if stage == ranks * chunks - 1:
        return done.get((stage, slot, False))
    return done.get((stage + 1, slot, True))


def _order(schedule: str, rank: int, ranks: int, slots: int, chunks: int) -> list[Operation]:
    forwards = [_numbered(number, rank, ranks, chunks, False) for number in range(slots * chunks)]
    backwards = [_numbered(number, rank, ranks, chunks, True) for number in range(slots * chunks)]
    first = {
        "gpipe": slots,
        "1f1b": ranks - rank - 1,
        "interleaved": (chunks - 1) * ranks + 2 * (ranks - rank - 1),
    }[schedule]
    order = forwards[:first]
    for number, backward in enumerate(backwards):
        order += [*forwards[first + number : first + number + 1], backward]
    return order


def _numbered(number: int, rank: int, ranks: int, chunks: int, is_backward: bool) -> Operation:
    """Return a rank's operation by its number: rounds of one micro-batch per rank, stage by stage."""
    round_, place = divmod(number, ranks * chunks)
    chunk, slot = divmod(place, ranks)
    return Operation(rank, chunks - 1 - chunk if is_backward else chunk, round_ * ranks + slot, is_backward)
