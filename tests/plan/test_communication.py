"""Ring volumes by hand: n ranks, b bytes."""

from __future__ import annotations

import pytest

from hpc_train.experiment.plan.prediction import communication
from hpc_train.experiment.topology.degrees import Degrees

GB = 10**9


@pytest.mark.parametrize(
    ("strategy", "degrees", "per_node", "sent", "within_node_gb", "between_nodes_gb"),
    [
        ("ddp", Degrees(replicate=16), 8, {"all_reduce": GB}, 0, 2 * 15 / 16),
        ("zero1", Degrees(shard=4), 4, {"all_reduce": GB, "all_gather": GB}, 2 * 3 / 4 + 3 / 4, 0),
        (
            *("hsdp", Degrees(replicate=2, shard=8), 8, {"all_gather": 2 * GB, "reduce_scatter": GB}),
            *(7 / 8 * 3, 2 * (1 / 2) * 1 / 8),
        ),
        # Layers are shared within a node; stages send between nodes.
        ("pipeline", Degrees(pipeline=2, tensor=4), 4, {"tensor_all_reduce": GB, "send": GB}, 2 * 3 / 4, 1),
        ("fsdp", Degrees(), 1, {"all_gather": GB, "reduce_scatter": GB}, 0, 0),
    ],
)
def test_ring_volumes(
    strategy: str,
    degrees: Degrees,
    per_node: int,
    sent: dict[str, int],
    within_node_gb: float,
    between_nodes_gb: float,
) -> None:
    volume = communication(strategy, degrees, per_node, sent)
    assert volume.within_node_gb == pytest.approx(within_node_gb)
    assert volume.between_nodes_gb == pytest.approx(between_nodes_gb)


def test_kinds_of_collectives_are_separate() -> None:
    volume = communication("zero1", Degrees(shard=4), 4, {"all_reduce": GB, "all_gather": GB})
    assert (volume.all_reduce_gb, volume.all_gather_gb) == (2 * 3 / 4, 3 / 4)
