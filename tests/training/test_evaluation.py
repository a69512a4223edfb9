"""Evaluation counts each sample once and knows nothing of how ranks share the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.training.datasets.sampler import EvaluationSampler
from hpc_train.training.datasets.types import Batch
from hpc_train.training.evaluation import evaluate
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_rank_group")

NUM_SAMPLES, SIZE = 103, 8
NUM_BATCHES = 13
CPU = torch.device("cpu")


def make_values() -> Tensor:
    """Numbers of all magnitudes, sixteen a sample: adding them in another order gives other sums."""
    generator = torch.Generator().manual_seed(1)
    exponents_NK = torch.randint(-8, 8, (NUM_SAMPLES, 16), generator=generator)
    return torch.randn(NUM_SAMPLES, 16, generator=generator, dtype=torch.float64) * 2.0**exponents_NK


def batches(rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
    for slot in EvaluationSampler(NUM_SAMPLES, SIZE, rank, world_size):
        valid = torch.arange(SIZE) < slot.num_valid
        yield Batch(0, slot.number, 1.0, make_values()[slot.indices], slot.indices, valid)


def sums_of(batch: Batch) -> dict[str, Any]:
    valid_BK = torch.where(batch.valid[:, None], batch.inputs, 0.0)
    return {
        "count": batch.valid.sum(dtype=torch.float64),
        "index": (batch.targets * batch.valid).sum(dtype=torch.float64),
        "digits": torch.bincount(batch.targets[batch.valid] % 6, minlength=6).view(2, 3),
        "rows": valid_BK.sum(0).view(4, 4),
        **{f"value{k}": value for k, value in enumerate(valid_BK.sum(0))},
        # Sample i has i mod 3 rows; what fills up the last batch must not be kept.
        "records": [batch.inputs[i, : 2 * (index % 3)].view(-1, 2) for i, index in enumerate(batch.targets)],
    }


def numbers_of(found: dict[str, Any] | None) -> dict[str, float] | None:
    """Name each number of a tensor, so that results can be compared."""
    if found is None:
        return None
    found = found | {"records": torch.cat([record.flatten() for record in found["records"]])}
    tensors = {
        name: torch.as_tensor(value, dtype=torch.float64).flatten().tolist() for name, value in found.items()
    }
    return {
        f"{name}.{place}": value for name, values in tensors.items() for place, value in enumerate(values)
    }


def evaluated(given: Iterable[Batch], sums: Any = sums_of, **keys: Any) -> dict[str, Any]:
    found = evaluate(given, NUM_BATCHES, sums, CPU, lambda place: None, lambda: False, **keys)
    assert found is not None
    return found


def on_rank(rank: int, world_size: int) -> dict[str, float] | None:
    return numbers_of(evaluated(batches(rank, world_size)))


def both_on_rank(rank: int, world_size: int) -> tuple[dict[str, float] | None, tuple[object, int]]:
    return on_rank(rank, world_size), stopped_on_rank(rank, world_size)


def stopped_on_rank(rank: int, world_size: int) -> tuple[object, int]:
    """Be asked to stop in the third batch; return what came of it and how many were evaluated."""
    seen: list[int] = []
    begun: list[int] = []

    def counted(batch: Batch) -> dict[str, Any]:
        seen.append(batch.number)
        return sums_of(batch)

    shard = batches(rank, world_size)
    result = evaluate(shard, NUM_BATCHES, counted, CPU, begun.append, lambda: len(seen) == 3)
    assert begun == [0, 1, 2, 3]  # the exchange runs beside the batch before
    return result, len(seen)


def test_every_sample_counts_exactly_once() -> None:
    found = evaluated(batches())
    assert found["count"] == NUM_SAMPLES
    assert found["index"] == sum(range(NUM_SAMPLES))
    assert found["value0"] == pytest.approx(float(make_values()[:, 0].sum()), rel=1e-12)
    assert found["digits"].sum() == NUM_SAMPLES and found["digits"].dtype == torch.int64
    expected = [found[f"value{place}"] for place in range(16)]
    assert found["rows"].flatten().tolist() == pytest.approx(expected, rel=1e-12)


def test_records_are_those_of_the_valid_samples_in_their_order() -> None:
    found = evaluated(batches())
    expected = [values[: 2 * (index % 3)].view(-1, 2) for index, values in enumerate(make_values())]
    assert [record.shape for record in found["records"]] == [record.shape for record in expected]
    assert all(map(torch.equal, found["records"], expected))


def test_records_that_are_not_one_per_sample_are_refused() -> None:
    def short(batch: Batch) -> dict[str, Any]:
        return {"count": batch.valid.sum(), "boxes": [batch.inputs[0]]}

    with pytest.raises(BadFileError, match=r"task: sums returned 1 records 'boxes' for 8 samples; return a"):
        evaluated(batches(), short)


def on_second_of_stages(rank: int, world_size: int) -> dict[str, float] | None:
    """Have the two ranks share a model, where the second owns the loss and the first has no records."""
    return numbers_of(evaluated(batches(), owns_loss=rank == 1))


@pytest.mark.slow
def test_ranks_that_own_no_loss_receive_the_records(tmp_path: Path) -> None:
    assert run_ranks(2, on_second_of_stages, folder=tmp_path) == [on_rank(0, 1)] * 2


def test_asked_to_stop_it_says_nothing_and_goes_no_further() -> None:
    assert stopped_on_rank(0, 1) == (None, 3)


def late_on_rank_0(rank: int, world_size: int) -> tuple[object, int]:
    """Have a collective forward, and be asked to stop before rank 0 has its third batch."""
    has_stopped = torch.zeros(())
    asked: list[Tensor] = []
    forwards: list[int] = []

    def late() -> Iterator[Batch | None]:
        for place, batch in enumerate(batches(rank, world_size)):
            if place == 2 and rank == 0:
                has_stopped.fill_(1)
                yield None
            else:
                yield batch

    def begin(place: int) -> None:
        asked.append(has_stopped.clone())

    def must_stop() -> bool:
        dist.all_reduce(asked[-1])
        return bool(asked[-1])

    def collective(batch: Batch) -> dict[str, Any]:
        forwards.append(batch.number)
        numbers = torch.tensor([batch.number])
        found = [torch.zeros_like(numbers) for _ in range(world_size)]
        dist.all_gather(found, numbers)
        assert [int(number) for number in found] == [len(forwards) * 2 - 2, len(forwards) * 2 - 1]
        return sums_of(batch)

    return evaluate(late(), NUM_BATCHES, collective, CPU, begin, must_stop), len(forwards)


@pytest.mark.slow
def test_a_forward_that_is_collective_begins_on_all_ranks_or_on_none(tmp_path: Path) -> None:
    assert run_ranks(2, late_on_rank_0, folder=tmp_path) == [(None, 2)] * 2


def test_a_batch_past_the_last_only_fills_up() -> None:
    # A rank of four has batches 12 and 13 … 15 in its last round; whatever those hold must not count.
    extra = Batch(
        0, NUM_BATCHES, 1.0, torch.full((SIZE, 16), 1e9), torch.ones(SIZE).long(), torch.ones(SIZE).bool()
    )
    assert numbers_of(evaluated([*batches(), extra])) == on_rank(0, 1)


def summed_rank_by_rank(world_size: int) -> dict[str, float]:
    """Add up each rank's batches, then the ranks' sums: what would be simpler and depends on the ranks."""
    totals: dict[str, float] = {}
    for rank in range(world_size):
        found = numbers_of(evaluated(batches(rank, world_size)))
        assert found is not None
        totals = {name: totals.get(name, 0.0) + value for name, value in without_records(found).items()}
    return totals


def without_records(found: dict[str, float] | None) -> dict[str, float]:
    assert found is not None
    return {name: value for name, value in found.items() if not name.startswith("records")}


def test_the_numbers_would_show_another_order() -> None:
    for world_size in (2, 3, 4):
        other = summed_rank_by_rank(world_size)
        assert other == pytest.approx(without_records(on_rank(0, 1)), rel=1e-9)
        assert other != without_records(on_rank(0, 1))


@pytest.mark.slow
def test_one_to_four_ranks_agree_bitwise(tmp_path: Path) -> None:
    alone = on_rank(0, 1)
    for ranks in (2, 3, 4):
        found = run_ranks(ranks, both_on_rank, folder=tmp_path)
        assert found == [(alone, (None, 3))] * ranks
