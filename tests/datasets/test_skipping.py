"""Samples that can't be read: real files that are damaged, and what replaces them."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hpc_train.errors import BadFileError, TransientStorageError
from hpc_train.experiment.config.training_sections import AugmentConfig
from hpc_train.paths import RunPaths
from hpc_train.run.bad_samples import BadSample, all_known
from hpc_train.training.datasets.augment import Augmentation
from hpc_train.training.datasets.base import DataSource, Split
from hpc_train.training.datasets.batches import TrainingBatches, evaluation_batches, training_batches
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.images import as_tensor
from hpc_train.training.datasets.sampler import Position
from hpc_train.training.datasets.skipping import BadSamples, stand_ins, too_many
from hpc_train.training.datasets.types import Batch
from tests.datasets.samples import AUGMENT, CPU, TOTAL_STEPS, OneByOne, experiment, random_split, source
from tests.waiting import HANG_LIMIT_S

pytestmark = pytest.mark.fault(22)

SAMPLES = 20  # G = 8: two steps per epoch


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])  # the header is whole, so it fails while it is decoded


def _garble(file: Path) -> None:
    file.write_bytes(np.random.default_rng(0).bytes(700))


def _empty(file: Path) -> None:
    file.write_bytes(b"")


DAMAGES: dict[int, Callable[[Path], None]] = {3: _truncate, 11: _garble, 12: _empty}


@pytest.fixture
def data(tmp_path: Path) -> DataSource:
    """Twenty JPEGs for training, three of them damaged; eleven for validation, with their own three."""
    pixels = np.random.default_rng(0)
    root = tmp_path / "images"
    for part, count in (("train", SAMPLES), ("val", 11)):
        for number in range(count):
            file = root / part / "ab"[2 * number // count] / f"{number:02}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(file)
    built = build_source(experiment().data.model_copy(update={"name": "imagefolder", "root": str(root)}))
    for index, damage in DAMAGES.items():
        damage(_file(built.train, index))
    assert built.val is not None
    for index in (0, 4, 5):
        _garble(_file(built.val, index))
    return built


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return run_paths(tmp_path / "run")


def run_paths(folder: Path, attempts: int = 2) -> RunPaths:
    paths = RunPaths(folder)
    for attempt in range(1, attempts + 1):
        paths.attempt(attempt).folder.mkdir(parents=True)
    return paths


def _file(split: Any, index: int) -> Path:
    path: Path = split.path(index)
    return path


def training(
    data: DataSource, paths: RunPaths, *, start: int = 0, rank: int = 0, ranks: int = 1, **keys: Any
) -> TrainingBatches:
    keys = {"augment": AUGMENT, **keys}
    bad = BadSamples(paths, 1, rank)
    return training_batches(
        data, experiment(**keys), Position(start), TOTAL_STEPS, rank, ranks, CPU, bad_samples=bad
    )


def slots(batches: TrainingBatches) -> dict[tuple[int, int], Batch]:
    with batches:
        return {(slot.step, slot.number): slot for _, step in batches for slot in step}


def assert_equal(ours: dict[tuple[int, int], Batch], theirs: dict[tuple[int, int], Batch]) -> None:
    assert ours.keys() == theirs.keys()
    for key, batch in ours.items():
        assert torch.equal(batch.inputs, theirs[key].inputs)
        assert torch.equal(batch.targets, theirs[key].targets)
        assert batch.valid.all()


@pytest.mark.parametrize(("index", "words"), [(3, "truncated"), (11, "cannot identify"), (12, "cannot iden")])
def test_a_damaged_file_is_named_and_ends_the_run(data: DataSource, index: int, words: str) -> None:
    others = [other for other in DAMAGES if other != index]
    for other in others:
        _file(data.train, other).write_bytes(_file(data.train, 0).read_bytes())
    batches = training_batches(data, experiment(), Position(0), TOTAL_STEPS, 0, 1, CPU)
    with pytest.raises(BadFileError, match=rf"^data: sample {index} \(.*\.jpg\) can't be read: .*{words}"):
        list(batches)


def test_workers_ranks_and_a_resume_take_the_same_in_its_place(data: DataSource, paths: RunPaths) -> None:
    alone = slots(training(data, paths))
    assert len(alone) == 4 * TOTAL_STEPS
    assert_equal(slots(training(data, paths, workers=2)), alone)
    for ranks in (2, 3):
        shares = [slots(training(data, paths, rank=rank, ranks=ranks)) for rank in range(ranks)]
        assert_equal({key: batch for share in shares for key, batch in share.items()}, alone)
    rest = {key: alone[key] for key in alone if key[0] >= 3}
    assert_equal(slots(training(data, paths, start=3)), rest)


class PartlyBroken(OneByOne):
    """Sample i is of class i; ``bad`` ones raise."""

    def __init__(self, bad: set[int], count: int = SAMPLES, error: Exception | None = None) -> None:
        super().__init__(random_split(count))
        self.bad = bad
        self._error = error or OSError("truncated")

    def __getitem__(self, index: int, /) -> tuple[Any, int]:
        if index in self.bad:
            raise self._error
        return super().__getitem__(index)


def indices_of(count: int = SAMPLES) -> dict[tuple[int, int], list[int]]:
    """Return which samples are where when all can be read."""
    data = source(random_split(count))
    with training_batches(data, experiment(), Position(0), TOTAL_STEPS, 0, 1, CPU) as batches:
        return {(slot.step, slot.number): slot.targets.tolist() for _, step in batches for slot in step}


def test_others_stay_and_the_place_keeps_its_own_augmentation(paths: RunPaths) -> None:
    split, whole = PartlyBroken({5, 6}), random_split(SAMPLES)
    found = slots(training(source(split), paths))
    augmentation = Augmentation(AugmentConfig(**AUGMENT), None, seed=0)
    replaced = 0
    for key, wanted in indices_of().items():
        epoch = key[0] // 2
        taken = [_taken(epoch, index, split.bad) for index in wanted]
        replaced += taken != wanted
        assert found[key].targets.tolist() == taken
        expected = augmentation(whole.images[taken], epoch, torch.tensor(wanted))
        assert torch.equal(found[key].inputs, expected)
    assert replaced


def _taken(epoch: int, index: int, bad: set[int]) -> int:
    if index not in bad:
        return index
    return next(other for _, other in stand_ins(0, epoch, index, SAMPLES) if other not in bad)


class Decoded:
    """A folder of images whose samples are decoded by ``__getitem__``, as those of a plug-in are."""

    def __init__(self, split: Any) -> None:
        self._split = split
        self.path = split.path

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, index: int, /) -> tuple[Any, int]:
        sample: tuple[Any, int] = self._split[index]
        return sample


@pytest.mark.parametrize("augment", [AUGMENT, {"random_resized_crop": {}}])
def test_files_are_replaced_alike_whenever_they_are_decoded(
    data: DataSource, tmp_path: Path, augment: dict[str, Any]
) -> None:
    for index in range(13, SAMPLES - 1):  # most replacements can't be decoded either
        _truncate(_file(data.train, index))
    ours, theirs = run_paths(tmp_path / "ours"), run_paths(tmp_path / "theirs")
    found = slots(training(data, ours, augment=augment, image_size=12))
    assert_equal(found, slots(training(source(Decoded(data.train)), theirs, augment=augment, image_size=12)))
    named = [paths.attempt(1).bad_samples(0).read_text() for paths in (ours, theirs)]
    assert named[0] == named[1]


@pytest.mark.fault(9)
def test_no_memory_to_decode_a_file_makes_no_sample_bad(
    data: DataSource, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("simplejpeg.decode_jpeg", fail)
    with pytest.raises(TransientStorageError, match=r"can't be read at the moment: MemoryError"):
        slots(training(data, paths))
    assert not {index for _, index in all_known(paths)} - {11, 12}


def test_another_epoch_takes_another_sample() -> None:
    firsts = {next(stand_ins(0, epoch, 5, 1000)) for epoch in range(10)}
    assert len(firsts) == 10
    assert all(other != 5 for _, other in stand_ins(0, 0, 5, 6))


def test_a_substitute_is_itself_named_where_it_is_bad(paths: RunPaths) -> None:
    split = PartlyBroken(set(range(SAMPLES)) - {7, 8, 9})
    found = slots(training(source(split), paths))
    assert {target for slot in found.values() for target in slot.targets.tolist()} == {7, 8, 9}
    assert all_known(paths).keys() == {("train", index) for index in split.bad}


@pytest.mark.parametrize("workers", [0, 1])
def test_where_nothing_can_be_read_the_run_ends(paths: RunPaths, workers: int) -> None:
    split = PartlyBroken(set(range(SAMPLES)))
    with pytest.raises(BadFileError, match=r"sample \d+ can't be read: OSError: truncated; nor can any"):
        slots(training(source(split), paths, workers=workers))


def test_whole_batches_that_cannot_be_read_are_errors(paths: RunPaths) -> None:
    class Batches(PartlyBroken):
        def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            raise BadFileError("data: the array is broken")

    with pytest.raises(BadFileError, match="the array is broken"):
        slots(training(source(Batches(set())), paths))


@pytest.mark.fault(9)
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_for_a_moment_makes_no_sample_bad(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    failures = {5: 2, 6: 2}

    class Flaky(PartlyBroken):
        def __getitem__(self, index: int, /) -> tuple[Any, int]:
            if failures.get(index, 0) > 0:
                failures[index] -= 1
                raise OSError(code, "try again")
            return super().__getitem__(index)

    monkeypatch.setattr("hpc_train.training.datasets.reading._PAUSES_S", (0.0, 0.0))
    slots(training(source(Flaky(set())), paths))
    failures[6] = 3
    with pytest.raises(TransientStorageError, match=r"sample 6 can't be read .*: OSError: .* try again"):
        slots(training(source(Flaky(set())), paths))
    assert not all_known(paths), "whatever stands in for it would make another run"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 3])
def test_evaluation_counts_each_good_sample_once_and_no_bad_one(
    data: DataSource, paths: RunPaths, workers: int, ranks: int
) -> None:
    assert data.val is not None
    counted: list[torch.Tensor] = []
    notes = [BadSamples(paths, 1, rank) for rank in range(ranks)]
    for rank in reversed(range(ranks)):
        for batch in _evaluation(data.val, rank, ranks, notes[rank], workers=workers):
            assert batch.inputs.shape == (2, 3, 12, 12)
            counted += list(batch.inputs[batch.valid])
    good = [as_tensor(data.val[index][0]) for index in range(11) if index not in (0, 4, 5)]
    assert sorted(image.sum().item() for image in counted) == sorted(image.sum().item() for image in good)
    # Sample 0 also fills up the last batch of rank 2, which is not the one to name it.
    assert [note.count for note in notes] == ([3] if ranks == 1 else [1, 0, 2])
    assert all_known(paths).keys() == {("val", 0), ("val", 4), ("val", 5)}


def _evaluation(split: Split, rank: int, ranks: int, bad: BadSamples, **keys: Any) -> list[Batch]:
    return list(evaluation_batches(split, experiment(**keys), rank, ranks, CPU, bad_samples=bad))


def test_evaluation_names_the_part_in_its_error(data: DataSource) -> None:
    assert data.val is not None
    with pytest.raises(BadFileError, match=r"^data: validation sample 0 \(.*val/a/00\.jpg\) can't be read"):
        list(evaluation_batches(data.val, experiment(), 0, 1, CPU))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_file_names_each_once(
    data: DataSource, paths: RunPaths, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    with caplog.at_level(logging.WARNING):
        slots(training(data, paths, workers=workers))
    lines = paths.attempt(1).bad_samples(0).read_text().splitlines()
    named = sorted((json.loads(line) for line in lines), key=lambda sample: sample["index"])
    assert [sample["index"] for sample in named] == sorted(DAMAGES)
    assert [sample["name"] for sample in named] == [str(_file(data.train, i)) for i in sorted(DAMAGES)]
    assert named[0]["split"] == "train"
    assert "truncated" in named[0]["why"]
    assert sorted(record.getMessage() for record in caplog.records) == sorted(
        f"data: skipped, since it can't be read: {sample}" for sample in all_known(paths).values()
    )


def test_what_is_read_ahead_and_never_used_is_not_named(paths: RunPaths) -> None:
    order = [index for wanted in indices_of().values() for index in wanted]
    split = PartlyBroken({order[3], order[8]})  # in the first step and in the second
    with training(source(split), paths, workers=2) as batches:
        next(batches)
        while not batches.is_ready(within_s=1.0):
            pass
        assert all_known(paths).keys() == {("train", order[3])}
        next(batches)
        assert all_known(paths).keys() == {("train", order[3]), ("train", order[8])}


def sample(index: int, name: str = "a.jpg") -> BadSample:
    return BadSample("train", index, name, "OSError: truncated")


def test_counts_of_ranks_and_attempts_add_up(paths: RunPaths) -> None:
    first, second = BadSamples(paths, 1, 0), BadSamples(paths, 1, 1)
    first.note([sample(1), sample(1), sample(2)])
    first.note([sample(2)])
    second.note([sample(2), sample(3)])  # the second epoch: rank 1 meets what rank 0 named
    assert (first.count, first.earlier) == (2, 0)
    assert (second.count, second.earlier) == (1, 0)
    resumed = BadSamples(paths, 2, 0)
    assert (resumed.count, resumed.earlier) == (0, 3)
    resumed.note([sample(3), sample(4), BadSample("val", 3, "b.jpg", "")])
    assert (resumed.count, resumed.earlier) == (2, 3)
    assert len(all_known(paths)) == 5


@pytest.mark.timeout(HANG_LIMIT_S)
@pytest.mark.parametrize("instead", [Path.mkdir, os.mkfifo])
def test_a_disk_that_refuses_the_name_ends_nothing(
    instead: Callable[[Path], None], paths: RunPaths, caplog: pytest.LogCaptureFixture
) -> None:
    instead(paths.attempt(1).bad_samples(0))
    bad = BadSamples(paths, 1, 0)
    bad.note([sample(1)])
    assert bad.count == 1
    assert "rank-0.bad_samples.jsonl can't be written" in caplog.text


def test_too_many_names_five_and_says_what_to_do(paths: RunPaths) -> None:
    BadSamples(paths, 1, 0).note([sample(index, f"\x1b[31m{index}.jpg") for index in range(7)])
    error = too_many(paths, at_most=6)
    assert error.problems[0] == (
        "data.max_bad_samples: more than 6 samples can't be read; fix or remove them, or write a larger "
        "number than 6:"
    )
    assert error.problems[1] == "  sample 0 (\\x1b[31m0.jpg): OSError: truncated"
    assert error.problems[-1] == "  … and 2 more, in attempts/*/rank-*.bad_samples.jsonl"
    assert len(error.problems) == 7
