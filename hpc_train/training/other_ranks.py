"""How the results change if a run continues on a different set of ranks than saved its checkpoint.

``training.train_state`` records the ranks at a save and compares them at a load. A difference is reported,
never refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hpc_train.topology.degrees import Degrees, in_words

_NOT_BITWISE = "weights equal an uninterrupted run's up to rounding, not bitwise"
_SYNCED = (
    "parallel.sync_batchnorm takes its statistics over one micro-batch of every rank, so the weights become "
    "others than an uninterrupted run's"
)
_STAGES = "dropout behind a pipeline's first stage draws other numbers"


def conditions(world_size: int, strategy: str, degrees: Degrees) -> dict[str, Any]:
    """Return a checkpoint's description of the ranks that save it, as JSON."""
    return {"world_size": world_size, "strategy": strategy, "degrees": asdict(degrees)}


def difference(
    then: Mapping[str, Any], now: Mapping[str, Any], step: int, *, has_batchnorm: bool, is_synced: bool
) -> str | None:
    """Return the effect of continuing from checkpoint ``step``; None if the same ranks continue.

    ``then`` and ``now`` are the ``conditions`` at the save and here; ``is_synced``:
    ``parallel.sync_batchnorm``.
    """
    differing = {key for key in now if key in then and then[key] != now[key]}
    if not differing:
        return None
    only_degrees = differing == {"degrees"}
    words = [f"the same micro-batches in the same order; {_NOT_BITWISE}"]
    if has_batchnorm and is_synced and _data_ranks(then) != _data_ranks(now):
        words = [_SYNCED]
    if "degrees" in differing and then["degrees"]["pipeline"] != now["degrees"]["pipeline"]:
        words.append(_STAGES)
    who = f"{_ranks(now, only_degrees)} from checkpoint {step} of {_ranks(then, only_degrees)}"
    return f"continuing with {who}: {'; '.join(words)}"


def _data_ranks(ranks: Mapping[str, Any]) -> int:
    return Degrees(**ranks["degrees"]).data_ranks


def _ranks(ranks: Mapping[str, Any], with_degrees: bool) -> str:
    """Return ``2 ranks under ddp``."""
    count = ranks["world_size"]
    words = f"{count} rank{'' if count == 1 else 's'} under {ranks['strategy']}"
    return f"{words} ({in_words(Degrees(**ranks['degrees']))})" if with_degrees else words
