from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
import torch

from hpc_train.errors import BadFileError
from hpc_train.training.datasets.sampler import EvaluationSampler, MicroBatchSampler, Position, Slot

N, G, SIZE, STEPS = 50, 12, 2, 11  # M = 6, E = 4


def sampler(position: Position | None = None, rank: int = 0, world_size: int = 1, **given: Any):
    values = {"global_batch_size": G, "micro_batch_size": SIZE, "seed": 3, "total_steps": STEPS, **given}
    return MicroBatchSampler(N, position=position or Position(0), rank=rank, world_size=world_size, **values)


def micro_batches(world_size: int, position: Position | None = None, **given: Any):
    """All ranks' slots that count: (step, number) → (window, epoch, indices, repeats)."""
    found: dict[tuple[int, int], Any] = {}
    for rank in range(world_size):
        for slot in sampler(position, rank, world_size, **given):
            if slot.weight:
                assert (slot.step, slot.number) not in found
                repeats = torch.as_tensor(slot.repeats).tolist()
                found[slot.step, slot.number] = (slot.window, slot.epoch, slot.indices.tolist(), repeats)
    return dict(sorted(found.items()))


@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6])
def test_any_number_of_ranks_reads_the_same_micro_batches(world_size: int, repeats: int) -> None:
    assert micro_batches(world_size, repeats=repeats) == micro_batches(1, repeats=repeats)


@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("start", [1, 3, 4, 10, 11])
@pytest.mark.parametrize("skipped", [(), (0,), (2, 3, 7), (4, 9, 40)])
def test_starting_anywhere_gives_the_tail(
    world_size: int, start: int, skipped: tuple[int, ...], repeats: int
) -> None:
    whole = micro_batches(world_size, Position(0, skipped), repeats=repeats)
    tail = {key: value for key, value in whole.items() if key[0] >= start}
    assert micro_batches(world_size, Position(start, skipped), repeats=repeats) == tail


def test_ranks_take_turns_and_spare_slots_weigh_nothing() -> None:
    slots = [
        [(s.number, s.weight) for s in sampler(rank=rank, world_size=4, total_steps=1)] for rank in range(4)
    ]
    sixth = 1 / 6
    assert slots == [
        [(0, sixth), (4, sixth)],
        [(1, sixth), (5, sixth)],
        [(2, sixth), (2, 0.0)],
        [(3, sixth), (3, 0.0)],
    ]
    first, spare = sampler(rank=2, world_size=4, total_steps=1)
    assert torch.equal(first.indices, spare.indices)


def test_an_epoch_is_a_permutation_without_its_remainder() -> None:
    epochs: dict[int, list[int]] = {}
    for slot in sampler(total_steps=8):
        epochs.setdefault(slot.epoch, []).extend(slot.indices.tolist())
    assert set(epochs) == {0, 1}
    for indices in epochs.values():
        assert len(indices) == 48
        assert len(set(indices)) == 48
        assert set(indices) <= set(range(N))
    assert epochs[0] != epochs[1]


def test_skipped_windows_are_omitted_and_the_rest_moves_up() -> None:
    windows = [slot.window for slot in sampler(Position(0, (1, 2, 5))) if slot.number == 0]
    assert windows == [0, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13]


def test_length_is_the_number_of_slots() -> None:
    for rank, start in itertools.product(range(4), [0, 5, STEPS, STEPS + 1]):
        made = sampler(Position(start), rank, 4)
        assert len(made) == len(list(made))


def test_another_seed_is_another_order_and_set_epoch_changes_nothing() -> None:
    assert micro_batches(1, seed=4) != micro_batches(1)
    first, second = sampler(), sampler()
    second.set_epoch(7)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.indices, b.indices)


def test_a_sampler_can_be_iterated_again() -> None:
    made = sampler()
    assert [s.indices.tolist() for s in made] == [s.indices.tolist() for s in made]


def test_a_slot_travels_small_and_whole() -> None:
    slot = next(iter(sampler()))
    sent = pickle.dumps(slot)
    back = pickle.loads(sent)
    assert isinstance(back, Slot)
    assert torch.equal(back.indices, slot.indices)
    assert (back.step, back.number, back.weight) == (slot.step, slot.number, slot.weight)
    assert len(sent) < 400
    slot = next(iter(sampler(repeats=4)))
    back = pickle.loads(pickle.dumps(slot))
    assert torch.equal(back.indices, slot.indices) and torch.equal(back.repeats, slot.repeats)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"global_batch_size": 52}, r"^optimization\.global_batch_size: 52 is more than the 50 "),
        ({"world_size": 7}, r"needs at most 6 ranks, one per micro-batch, got 7; start 6 ranks or fewer"),
        ({"repeats": 5}, r"^data\.augment\.repeats: 5 does not divide .* 12; write 4, or "),
    ],
)
def test_sizes_that_do_not_fit_are_refused(given: dict[str, int], message: str) -> None:
    with pytest.raises(BadFileError, match=message):
        sampler(**given)


def test_positions_must_be_sorted() -> None:
    with pytest.raises(AssertionError):
        Position(0, (3, 2))


@pytest.mark.parametrize("repeats", [2, 3, 4, 12])
def test_a_step_reads_each_of_its_samples_as_often_as_repeats_says(repeats: int) -> None:
    found = micro_batches(1, repeats=repeats, total_steps=4)
    samples: list[int] = []
    for step in range(4):
        pairs = [pair for number in range(6) for pair in zip(*found[step, number][2:], strict=True)]
        indices = sorted({index for index, _ in pairs})
        assert sorted(pairs) == [(index, repeat) for index in indices for repeat in range(repeats)]
        assert len(indices) == G // repeats
        samples += indices
    # One epoch of as many steps as without repeats: it sees only a part of the samples, none twice.
    assert len(samples) == len(set(samples)) == 4 * G // repeats
    assert [slot.epoch for slot in sampler(repeats=repeats)] == [slot.epoch for slot in sampler()]


def test_repeats_are_dealt_to_micro_batches_as_timm_deals_them_to_ranks() -> None:
    from timm.data.distributed_sampler import RepeatAugSampler

    # timm: one rank per micro-batch; 256 is the multiple to which it rounds the samples of an epoch.
    count, ranks, size, repeats = 512, 4, 8, 3
    theirs = [
        list(RepeatAugSampler(range(count), ranks, rank, shuffle=False, num_repeats=repeats))
        for rank in range(ranks)
    ]
    batch = ranks * size * repeats
    found = MicroBatchSampler(
        count, global_batch_size=batch, micro_batch_size=size * repeats, seed=0, repeats=repeats,
        position=Position(0), total_steps=count // batch,
    )  # fmt: skip
    found._cached = 0, torch.arange(count)  # not shuffled
    for slot in found:
        assert slot.epoch == 0
        start = slot.step * size * repeats
        assert slot.indices.tolist() == theirs[slot.number][start : start + size * repeats]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 41])
def test_evaluation_counts_each_sample_once(count: int, world_size: int) -> None:
    seen: list[int] = []
    lengths = set()
    for rank in range(world_size):
        slots = list(EvaluationSampler(count, 4, rank, world_size))
        lengths.add(len(slots))
        for slot in slots:
            assert slot.indices.shape == (4,)
            assert slot.num_valid in range(5)
            seen += slot.indices[: slot.num_valid].tolist()
            assert (slot.indices < max(count, 1)).all()
    assert sorted(seen) == list(range(count))
    assert len(lengths) == 1
