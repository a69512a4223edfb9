from __future__ import annotations

import os
import random
import signal
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hpc_train.errors import BadFileError
from hpc_train.training.datasets.batches import evaluation_batch_count, evaluation_batches
from hpc_train.training.datasets.random_numbers import restored_generators, seed_generators
from tests.datasets.samples import (
    AUGMENT,
    CPU,
    TOTAL_STEPS,
    BrokenSplit,
    OneByOne,
    RandomSplit,
    assert_equal,
    experiment,
    random_split,
    steps,
    training,
)


def test_each_step_gives_its_slots_in_order() -> None:
    batches = steps(random_split(20))
    assert [step for step, _ in batches] == list(range(TOTAL_STEPS))
    for step, slots in batches:
        assert [(slot.step, slot.number, slot.weight) for slot in slots] == [
            (step, i, 0.25) for i in range(4)
        ]
        assert all(slot.inputs.shape == (2, 3, 12, 12) and slot.valid.all() for slot in slots)


@pytest.mark.parametrize("split", [random_split(20), OneByOne(random_split(20))])
def test_repeats_of_a_sample_are_augmented_differently_and_the_same_after_a_resume(split: Any) -> None:
    augment = {**AUGMENT, "repeats": 2}
    whole = steps(split, augment=augment)
    for _, slots in whole:
        targets = torch.cat([slot.targets for slot in slots])
        inputs = torch.cat([slot.inputs for slot in slots])
        for target in targets.unique():
            first, second = inputs[targets == target]
            assert not torch.equal(first, second)
    assert_equal(steps(split, augment=augment, start=3), whole[3:])
    shared = {(s.step, s.number): s for rank in (0, 1) for _, own in steps(
        split, augment=augment, rank=rank, world_size=2) for s in own}  # fmt: skip
    for slot in (slot for _, slots in whole for slot in slots):
        assert torch.equal(slot.inputs, shared[slot.step, slot.number].inputs)


def test_whole_batches_equal_samples_read_one_by_one() -> None:
    for extra in ({}, {"image_size": 8}):
        assert_equal(steps(random_split(20), **extra), steps(OneByOne(random_split(20)), **extra))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("split", "keys"),
    [
        (RandomSplit(), {}),
        (
            random_split(20),
            {
                "transform": "tests.end_to_end.parts:noise",
                "augment": {"randaugment": {"operations": "timm"}},
            },
        ),
    ],
    ids=["data set", "transform"],
)
def test_generators_of_the_rank_are_left_as_they_were(split: Any, keys: dict[str, Any], workers: int) -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.random(), torch.rand(()).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    steps(split, workers=workers, **keys)
    assert (random.random(), np.random.random(), torch.rand(()).item()) == expected


def test_careless_data_sets_draw_new_numbers_each_epoch() -> None:
    slots = [slot for _, slots in steps(RandomSplit(), augment={}) for slot in slots]
    drawn = torch.cat([slot.inputs[:, :, 0, 0] for slot in slots])
    for generator, numbers in zip(("Python", "NumPy", "torch"), drawn.unbind(1), strict=True):
        assert len(numbers.unique()) == len(drawn) == TOTAL_STEPS * 8, generator


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("truncated"), r"^data: sample 5 \(folder/5\.png\) can't be read: OSError: truncated; "),
        (KeyError("x"), r"sample 5 .* KeyError: 'x' \(at .*samples\.py:\d+\)$"),
    ],
)
def test_an_unreadable_sample_is_named(workers: int, error: Exception, words: str) -> None:
    with pytest.raises(BadFileError, match=words):
        steps(BrokenSplit(error), workers=workers)


def test_workers_outlive_the_jobs_signals_and_end_when_closed() -> None:
    batches = training(random_split(20), workers=2)
    pids = batches.stream.worker_pids
    assert len(pids) == 2
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        for pid in pids:
            os.kill(pid, number)
    assert len(list(batches)) == TOTAL_STEPS
    assert batches.stream.worker_pids == []


def test_closing_early_ends_the_workers() -> None:
    batches = training(random_split(20), total_steps=1000, workers=2)
    next(batches)
    pids = batches.stream.worker_pids
    batches.close()
    batches.close()
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(StopIteration):
        next(batches)


def test_the_ranks_own_signal_mask_is_kept() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    steps(random_split(20), workers=1)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_counts_each_sample_once_and_is_not_augmented(workers: int, world_size: int) -> None:
    split = random_split(11)
    found: dict[int, torch.Tensor] = {}
    for rank in range(world_size):
        batches = evaluation_batches(
            split, experiment(augment=AUGMENT, workers=workers), rank, world_size, CPU
        )
        assert len(batches) == len(list(batches)) == -(-evaluation_batch_count(split, 2) // world_size)
        for batch in batches:
            assert batch.inputs.shape == (2, 3, 12, 12)
            for image, target, valid in zip(batch.inputs, batch.targets, batch.valid, strict=True):
                if valid:
                    assert int(target) not in found
                    found[int(target)] = image
    assert sorted(found) == list(range(11))
    assert all(torch.equal(image, split.images[target]) for target, image in found.items())


class CountedSplit(OneByOne):
    reads = 0

    def __getitem__(self, index: int, /) -> Any:
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(("limit", "reads"), [(1 << 20, 12), (1, 36)])
def test_a_small_evaluation_is_read_once_even_if_the_model_overwrites_it(
    limit: int, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_train.training.datasets.batches._MAX_KEPT_BYTES", limit)
    split = CountedSplit(random_split(12))
    evaluation = evaluation_batches(split, experiment(), 0, 1, CPU, keeps=True)
    next(iter(evaluation))  # a pass that ends early is not kept
    split.reads = 0
    first = [batch.clone() for batch in evaluation]
    for batch in evaluation:
        batch.inputs.zero_()
    again = list(evaluation)
    assert split.reads == reads
    assert all(torch.equal(one.inputs, other.inputs) for one, other in zip(first, again, strict=True))
    assert [batch.number for batch in again] == [batch.number for batch in first]


def test_evaluation_batches_are_numbered_over_all_ranks() -> None:
    numbers = [
        [batch.number for batch in evaluation_batches(random_split(11), experiment(), rank, 2, CPU)]
        for rank in range(2)
    ]
    assert numbers == [[0, 2, 4], [1, 3, 5]]


def test_pil_images_of_unequal_size_need_image_size() -> None:
    images = [(Image.new("RGB", (20 + i, 30)), i) for i in range(8)]
    with pytest.raises(BadFileError, match=r"data\.image_size: images differ in shape \(30x2\d and 30x2\d\)"):
        steps(images)
    with pytest.raises(BadFileError, match=r"data\.image_size"):
        list(evaluation_batches(images, experiment(), 0, 1, CPU))
    assert steps(images, image_size=16)[0][1][0].inputs.shape == (2, 3, 16, 16)
    (first, *_) = evaluation_batches(images, experiment(image_size=16), 0, 1, CPU)
    assert first.inputs.shape == (2, 3, 16, 16)


def test_a_seed_gives_data_sets_the_same_numbers_in_all_versions() -> None:
    """A run that is resumed after an upgrade draws what it would have drawn."""
    with restored_generators():
        seed_generators(2**40 + 3)
        drawn = random.random(), float(np.random.random()), torch.initial_seed()
        seed_generators(2**64 - 1)
    assert drawn == (0.21978710637116716, 0.5507979025745755, 549755813889)
