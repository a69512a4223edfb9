"""Pictures of an evaluation: which samples, of which pixels, and the same on any number of ranks."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from hpc_train.config.schema import Experiment
from hpc_train.datasets.base import DataSource, TensorSplit
from hpc_train.datasets.normalize import Normalize
from hpc_train.datasets.sampler import EvaluationSampler
from hpc_train.datasets.types import Batch, DataInfo
from hpc_train.tasks import drawing
from hpc_train.tasks.base import Task
from hpc_train.tasks.classification import Classification
from hpc_train.training.evaluation_outputs import Pictures, evenly_spaced, on_rank_0, rgb
from tests.ranks import run_ranks
from tests.tasks.test_classification import experiment

NUM_SAMPLES, SIZE = 19, 4
INFO = DataInfo(10, 3, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def images() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (NUM_SAMPLES, 3, 6, 5), dtype=torch.uint8, generator=generator)


def config(**evaluation: int) -> Experiment:
    return Experiment.model_validate(experiment().model_dump() | {"evaluation": evaluation})


def source(info: DataInfo = INFO) -> DataSource:
    split = TensorSplit(images(), torch.arange(NUM_SAMPLES) % 10)
    return DataSource(split, split, info)


class Plain(Classification):
    """Each picture is the sample's image with the number of its target to the right, as so many pixels."""

    def picture(self, outputs: Tensor, batch: Batch, place: int, image: Image.Image) -> Image.Image | None:
        number = int(batch.targets[place])
        if number == 9:
            return None
        found = Image.new("L", (image.width + number, image.height))
        found.paste(image.convert("L"))
        return found


def task(kind: type[Classification] = Classification) -> Any:
    return kind(config(), INFO)


def pictures(kind: type[Classification] = Classification, count: int = 5) -> Pictures:
    made = Pictures.of(config(images=count), source(), task(kind))
    assert made is not None
    return made


def batches(rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
    for slot in EvaluationSampler(NUM_SAMPLES, SIZE, rank, world_size):
        valid = torch.arange(SIZE) < slot.num_valid
        yield Batch(0, slot.number, 1.0, images()[slot.indices], slot.indices % 10, valid)


def outputs_of(batch: Batch) -> Tensor:
    return torch.randn(10, 10, generator=torch.Generator().manual_seed(1))[batch.targets]


def evaluated(drawn: Pictures, rank: int = 0, world_size: int = 1) -> dict[str, bytes]:
    for prefix in ("", "ema_"):
        drawn.begin(prefix)
        for batch in batches(rank, world_size):
            drawn.add(prefix, outputs_of(batch), batch, batch)
    return drawn.files(0, {})


def on_ranks(rank: int, world_size: int) -> list[dict[str, bytes]]:
    """Return the files of ranks that share the data, and of ranks of which only the last has outputs."""
    last = pictures()
    last.begin("")
    if rank == world_size - 1:
        for batch in batches():
            last.add("", outputs_of(batch), batch, batch)
    return [evaluated(pictures(), rank, world_size), last.files(0, {})]


@pytest.mark.slow
@pytest.mark.usefixtures("_group")
def test_files_are_the_same_on_one_to_three_ranks(tmp_path: Path) -> None:
    alone = on_ranks(0, 1)
    assert alone[0].keys() == {"predictions.png", "ema_predictions.png"}
    for world_size in (2, 3):
        first, *others = run_ranks(world_size, on_ranks, folder=tmp_path)
        assert first == alone
        assert others == [[{}, {}]] * (world_size - 1), "only rank 0 has them"


@pytest.mark.usefixtures("_group")
def test_a_sheet_has_the_chosen_samples_in_order() -> None:
    made = pictures()
    assert made.chosen == (0, 3, 7, 11, 15)
    expected = []
    for index in made.chosen:
        (batch,) = [each for each in batches() if each.number == index // SIZE]
        image = Image.fromarray(images()[index].permute(1, 2, 0).contiguous().numpy())
        picture = task().picture(outputs_of(batch), batch, index % SIZE, image)
        expected.append((f"sample {index}", picture))
    content = evaluated(made)["predictions.png"]
    assert Image.open(io.BytesIO(content)).tobytes() == drawing.sheet(expected).tobytes()
    assert evaluated(made)["predictions.png"] == content, "the next evaluation has the same"


@pytest.mark.usefixtures("_group")
def test_a_sample_without_a_picture_is_omitted() -> None:
    made = replace(pictures(Plain), chosen=(7, 8, 9))
    for batch in batches():
        made._drawn.setdefault("", {})
        made.add("", None, batch, batch)
    found = on_rank_0(made._drawn[""], 3)
    assert {number: picture.size for number, picture in found.items()} == {0: (12, 6), 1: (13, 6)}
    assert all(picture.mode == "RGB" for picture in found.values())


@pytest.mark.usefixtures("_group")
def test_samples_that_are_not_valid_are_omitted() -> None:
    made = pictures(count=NUM_SAMPLES)
    made.begin("")
    for batch in batches():
        made.add("", outputs_of(batch), batch, replace(batch, valid=batch.valid & (batch.targets != 3)))
    assert sorted(made._drawn[""]) == [number for number in range(NUM_SAMPLES) if number % 10 != 3]


@pytest.mark.usefixtures("_group")
def test_an_evaluation_that_was_cut_short_leaves_nothing() -> None:
    made = pictures()
    made.begin("")
    first, *_ = batches()
    made.add("", outputs_of(first), first, first)
    made.begin("")
    assert made.files(0, {}) == {}


@pytest.mark.usefixtures("_group")
def test_a_task_that_fails_to_draw_does_not_end_training(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Classification):
        def picture(self, *_: Any) -> Any:
            raise ValueError("no picture")

    assert evaluated(pictures(Broken)) == {}
    assert [record.message for record in caplog.records] == [
        "predictions can't be drawn; training continues without"
    ]


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize(
    "inputs",
    [
        torch.zeros(SIZE, 7),
        torch.zeros(SIZE, 3, 6, 5, dtype=torch.int64),
        torch.zeros(SIZE, 3, 0, 5, dtype=torch.uint8),
        {"a": torch.zeros(SIZE, 3, 6, 5), "b": torch.zeros(SIZE, 2, dtype=torch.uint8)},
    ],
)
def test_features_have_no_pictures(inputs: Any) -> None:
    made = pictures()
    made.begin("")
    for batch in batches():
        made.add("", outputs_of(batch), batch, replace(batch, inputs=inputs))
    assert made.files(0, {}) == {}


@pytest.mark.usefixtures("_group")
def test_of_several_inputs_the_first_image_is_shown() -> None:
    made, plain = pictures(), pictures()
    for each, name in ((made, "several"), (plain, "one")):
        each.begin("")
        for batch in batches():
            inputs: Any = {"age": torch.ones(SIZE, 2), "photo": batch.inputs}
            seen = replace(batch, inputs=inputs) if name == "several" else batch
            each.add("", outputs_of(batch), batch, seen)
    assert made.files(0, {}) == plain.files(0, {})


def test_off_or_without_validation_data_nothing_is_drawn() -> None:
    class Other:
        pass

    own: Task = task()
    assert Pictures.of(config(images=0), source(), own) is None
    assert Pictures.of(config(), replace(source(), val=None), own) is None
    assert Pictures.of(config(), source(), Other()) is None  # type: ignore[arg-type]
    assert Pictures.of(config(), source(replace(INFO, sequence_length=4)), own) is None
    assert Pictures.of(config(), source(), own) is not None


def test_samples_are_spread_evenly() -> None:
    assert evenly_spaced(101, 8) == (0, 12, 25, 37, 50, 63, 75, 88)
    assert evenly_spaced(3, 8) == (0, 1, 2)


def test_bytes_are_shown_as_they_are() -> None:
    image = images()[0]
    assert torch.equal(torch.from_numpy(rgb(image, (), ())).permute(2, 0, 1), image)


@pytest.mark.parametrize(
    ("channels", "shown"), [(1, (0, 0, 0)), (2, (0, 0, 0)), (4, (0, 1, 2)), (7, (0, 1, 2))]
)
def test_other_numbers_of_channels_are_shown(channels: int, shown: tuple[int, ...]) -> None:
    image = torch.arange(channels * 6, dtype=torch.uint8).view(channels, 2, 3)
    assert torch.equal(torch.from_numpy(rgb(image, (), ())).permute(2, 0, 1), image[list(shown)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_float_images_are_shown_without_their_normalization(dtype: torch.dtype) -> None:
    normalized = Normalize(INFO, config().data, dtype)(images())
    shown = torch.from_numpy(rgb(normalized[0], INFO.mean, INFO.std)).permute(2, 0, 1)
    assert torch.equal(shown, images()[0])


def test_float_images_of_any_range_fill_it_from_black_to_white() -> None:
    image = torch.tensor([[[-1000.0, 0.0, 1000.0, torch.nan]]])
    assert rgb(image, (0.0,), (1.0,))[0, :, 0].tolist() == [0, 128, 255, 128]
    assert not rgb(torch.full((1, 2, 2), 7.0), (0.0,), (1.0,)).any(), "all the same"


def test_values_that_do_not_fit_the_channels_are_not_used() -> None:
    image = torch.tensor([[[0.0, 0.5]], [[0.0, 0.5]]])
    assert rgb(image, (0.5,) * 3, (0.5,) * 3)[0, :, 0].tolist() == [0, 128]
