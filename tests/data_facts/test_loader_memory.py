"""The memory of batches that loader processes prefetch, computed from the experiment file alone."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_train.experiment.data_facts.by_name import prefetched_bytes
from tests.datasets.samples import experiment


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"workers": 3, "image_size": 10}, 3 * 2 * 2 * 3 * 10 * 10),
        ({"workers": 3, "args": {"image_size": 10, "channels": 1}}, 3 * 2 * 2 * 10 * 10),
        ({"workers": 0}, 0),
        ({"workers": "auto"}, None),
        ({"workers": 1, "name": "imagefolder", "root": "/data"}, None),
        ({"workers": 1, "name": "package.module:factory"}, None),
    ],
)
def test_bytes_of_one_rank(keys: dict[str, Any], expected: int | None) -> None:
    assert prefetched_bytes(experiment(**keys)) == expected


def test_all_ranks_of_a_node_share_the_memory() -> None:
    one, eight = (prefetched_bytes(experiment(workers=2), ranks) for ranks in (1, 8))
    assert one is not None and eight == 8 * one
