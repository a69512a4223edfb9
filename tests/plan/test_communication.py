"""Ring volumes by hand: n ranks, b bytes."""

from __future__ import annotations

import pytest

from hpc_train.plan.prediction import communication
from hpc_train.topology.degrees import Degrees

GB = 10**9


def test_ddp_reduces_all_gradients() -> None:
    found = communication("ddp", Degrees(replicate=16), 8, {"all_reduce": GB})
    assert found.all_reduce_gb == pytest.approx(2 * 15 / 16)
    assert (found.within_node_gb, found.between_nodes_gb) == (0, found.all_reduce_gb)


def test_zero1_also_gathers_parameters() -> None:
    found = communication("zero1", Degrees(shard=4), 4, {"all_reduce": GB, "all_gather": GB})
    assert (found.all_reduce_gb, found.all_gather_gb) == (2 * 3 / 4, 3 / 4)
    assert found.between_nodes_gb == 0


def test_hsdp_reduces_shards_between_nodes() -> None:
    found = communication(
        "hsdp", Degrees(replicate=2, shard=8), 8, {"all_gather": 2 * GB, "reduce_scatter": GB}
    )
    assert found.between_nodes_gb == pytest.approx(2 * (1 / 2) * 1 / 8)
    assert found.within_node_gb == pytest.approx(7 / 8 * 3)


def test_layers_shared_in_a_node_and_stages_between() -> None:
    degrees = Degrees(pipeline=2, tensor=4)
    found = communication("pipeline", degrees, 4, {"tensor_all_reduce": GB, "send": GB})
    assert found.within_node_gb == pytest.approx(2 * 3 / 4)
    assert found.between_nodes_gb == pytest.approx(1)


def test_one_rank_sends_nothing() -> None:
    found = communication("fsdp", Degrees(), 1, {"all_gather": GB, "reduce_scatter": GB})
    assert found.within_node_gb == found.between_nodes_gb == 0
