"""Pictures of an evaluation: which samples, of which pixels, and the same on any number of ranks."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from hpc_train.errors import StorageError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.paths import RunPaths
from hpc_train.training import evaluation_outputs
from hpc_train.training.datasets.base import DataSource, TensorSplit
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.normalize import Normalize
from hpc_train.training.datasets.sampler import EvaluationSampler
from hpc_train.training.datasets.tokenization import decoder_of
from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.evaluation_outputs import (
    EvaluationFiles,
    Pictures,
    TaskFiles,
    TextSamples,
    continued,
    drawn,
    evenly_spaced,
    on_rank_0,
    rgb,
)
from hpc_train.training.models.building import build_model
from hpc_train.training.tasks import drawing
from hpc_train.training.tasks.base import Task, make_task
from hpc_train.training.tasks.classification import Classification
from tests.experiments import tiny_experiment
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_rank_group")

NUM_SAMPLES, SIZE = 19, 4
INFO = DataInfo(10, 3, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))


def images() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (NUM_SAMPLES, 3, 6, 5), dtype=torch.uint8, generator=generator)


def config(**evaluation: int) -> Experiment:
    return tiny_experiment(evaluation=evaluation)


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


def shown(made: Pictures, change: Callable[[Batch], Batch] = lambda batch: batch) -> dict[str, bytes]:
    """Return the files of an evaluation of which ``change`` gives the batches that are seen."""
    made.begin("")
    for batch in batches():
        made.add("", outputs_of(batch), batch, change(batch))
    return made.files(0, {})


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
def test_files_are_the_same_on_one_to_three_ranks(tmp_path: Path) -> None:
    alone = on_ranks(0, 1)
    assert alone[0].keys() == {"predictions.png", "ema_predictions.png"}
    for world_size in (2, 3):
        first, *others = run_ranks(world_size, on_ranks, folder=tmp_path)
        assert first == alone
        assert others == [[{}, {}]] * (world_size - 1), "only rank 0 has them"


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
    found, sheet = Image.open(io.BytesIO(content)), drawing.sheet(expected)
    assert found.tobytes() == sheet.tobytes()
    assert found.info[drawing.DESCRIPTION] == json.dumps(sheet.info[drawing.DESCRIPTION])
    assert evaluated(made)["predictions.png"] == content, "the next evaluation has the same"


def test_a_sample_without_a_picture_is_omitted() -> None:
    made = replace(pictures(Plain), chosen=(7, 8, 9))
    for batch in batches():
        made._drawn.setdefault("", {})
        made.add("", None, batch, batch)
    found = on_rank_0(made._drawn[""], 3)
    assert {number: picture.size for number, picture in found.items()} == {0: (12, 6), 1: (13, 6)}
    assert all(picture.mode == "RGB" for picture in found.values())


def test_samples_that_are_not_valid_are_omitted() -> None:
    made = pictures(count=NUM_SAMPLES)
    made.begin("")
    for batch in batches():
        made.add("", outputs_of(batch), batch, replace(batch, valid=batch.valid & (batch.targets != 3)))
    assert sorted(made._drawn[""]) == [number for number in range(NUM_SAMPLES) if number % 10 != 3]


def test_an_evaluation_that_was_cut_short_leaves_nothing() -> None:
    made = pictures()
    made.begin("")
    first, *_ = batches()
    made.add("", outputs_of(first), first, first)
    made.begin("")
    assert made.files(0, {}) == {}


def test_a_task_that_fails_to_draw_does_not_end_training(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Classification):
        def picture(self, *_: Any) -> Any:
            raise ValueError("no picture")

    assert evaluated(pictures(Broken)) == {}
    assert [record.message for record in caplog.records] == [
        "predictions can't be drawn; training continues without"
    ]


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
    assert shown(pictures(), lambda batch: replace(batch, inputs=inputs)) == {}


def test_of_several_inputs_the_first_image_is_shown() -> None:
    def several(batch: Batch) -> Batch:
        inputs: Any = {"age": torch.ones(SIZE, 2), "photo": batch.inputs}
        return replace(batch, inputs=inputs)

    assert shown(pictures(), several) == shown(pictures())


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


@pytest.mark.parametrize(
    ("channels", "shown"), [(1, (0, 0, 0)), (2, (0, 0, 0)), (3, (0, 1, 2)), (4, (0, 1, 2)), (7, (0, 1, 2))]
)
def test_images_of_bytes_are_shown_unchanged(channels: int, shown: tuple[int, ...]) -> None:
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
    two = torch.tensor([[[0.0, 0.5]], [[0.0, 0.5]]])
    assert rgb(two, (0.5,) * 3, (0.5,) * 3)[0, :, 0].tolist() == [0, 128], "not the values of 3 channels"


class WithTable:
    def files(self, sums: dict[str, Any]) -> dict[str, bytes]:
        return {"table.csv": str(sums["count"]).encode()}


def names(paths: RunPaths) -> list[str]:
    return sorted(str(path.relative_to(paths.folder)) for path in paths.folder.rglob("*.csv"))


def test_a_task_names_its_files_and_averages_have_a_prefix() -> None:
    sums = {"": {"count": 2}, "ema_": {"count": 3}}
    assert TaskFiles(WithTable()).files(20, sums) == {"table.csv": b"2", "ema_table.csv": b"3"}


def test_files_after_the_step_of_a_resume_are_withdrawn(tmp_path: Path) -> None:
    files = EvaluationFiles(RunPaths(tmp_path))
    files.withdraw(0)  # none yet
    files.write(10, {"table.csv": b"old"})
    for step in (10, 20, 123456789):
        files.write(step, {"table.csv": b""})
    assert (tmp_path / "evaluations/step-00000010/table.csv").read_bytes() == b"", "the repeated one's"
    (tmp_path / "evaluations/notes.csv").touch()
    files.withdraw(10)
    assert names(files.paths) == ["evaluations/notes.csv", "evaluations/step-00000010/table.csv"]


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> Any:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(evaluation_outputs, "replacing", full)
    with pytest.raises(StorageError, match=r"step-00000001/table\.csv: the disk is full"):
        EvaluationFiles(RunPaths(tmp_path)).write(1, {"table.csv": b""})


TEXT_INFO = DataInfo(5, 0, (), (), tuple("abcde"), sequence_length=4)


def next_letter(batch: Batch) -> Tensor:
    """Return logits that are certain of the next letter of the alphabet, and of a token beyond it."""
    logits = torch.nn.functional.one_hot((batch.inputs + 1) % 5, 7).float() * 100
    logits[..., 6] = 1000
    return logits


def test_a_sample_continues_the_prompt_over_the_end_of_the_window() -> None:
    shapes = []

    def outputs(batch: Batch) -> Tensor:
        shapes.append(tuple(batch.inputs.shape))
        return next_letter(batch)

    assert continued(outputs, (2,), 9, TEXT_INFO, seed=0, step=3) == [2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert shapes == [(1, 4)] * 9, "always one window"


def test_tokens_are_drawn_by_probability_from_the_most_probable() -> None:
    logits = torch.tensor([0.1, 0.6, 0.3]).log()
    tokens = {0.0: 1, 0.59: 1, 0.61: 2, 0.89: 2, 0.91: 0, 1 - 1e-16: 0}
    assert {number: drawn(logits, number) for number in tokens} == tokens
    even = torch.zeros(100)
    assert {drawn(even, number / 1000) for number in range(1000)} == set(range(40)), "of 40"


def test_draws_depend_on_seed_and_step_and_touch_no_generator() -> None:
    def even(batch: Batch) -> Tensor:
        return torch.zeros(1, 4, 5)

    before = torch.get_rng_state()
    samples = [continued(even, (0,), 30, TEXT_INFO, *key) for key in ((0, 1), (0, 1), (0, 2), (1, 1))]
    assert torch.equal(torch.get_rng_state(), before)
    assert samples[0] == samples[1] and len(set(map(tuple, samples))) == 3
    assert set(samples[0]) == set(range(5))


def text_experiment(root: Path, strategy: str = "ddp", sample_tokens: int = 8) -> Experiment:
    return tiny_experiment(
        task="causal_lm",
        model={"name": "gpt", "args": {"dim": 16, "num_layers": 1, "num_heads": 2}},
        data={"name": "text", "root": str(root), "args": {"sequence_length": 8}},
        parallel={"strategy": strategy},
        evaluation={"sample_tokens": sample_tokens},
    )


def test_the_file_has_prompt_and_continuation(tmp_path: Path) -> None:
    (root := tmp_path / "text.txt").write_text("to be or not to be " * 20)
    config = text_experiment(root)
    source = build_source(config.data)
    task = make_task(config, source.info)
    torch.manual_seed(0)
    model = build_model(config.model, source.info).eval()
    samples = TextSamples.of(config, source, task, lambda batch: task.forward(model, batch))
    assert samples is not None and source.val is not None
    with torch.no_grad():
        files = samples.files(5, {})
    prompt, text = files["sample.txt"].decode().split("\n--- continued by the model: ---\n")
    first, _ = source.val.batch(torch.tensor([0]))  # type: ignore[union-attr]
    decoder = decoder_of(source.info)
    assert decoder is not None and prompt == decoder.decode(first[0, :4].tolist())
    assert len(text) == 8 + 1 and set(text) <= {*source.info.class_names, "\n"}
    unknown = TextSamples(next_letter, DataInfo(5, 0, (), (), (), 4, tokenizer="gpt2"), 0, (1, 2), 1)
    assert unknown.files(0, {})["sample.txt"].decode().startswith("1 2\n"), "numbers where none decodes"


@pytest.mark.parametrize("changes", [{"strategy": "pipeline"}, {"strategy": "split"}, {"sample_tokens": 0}])
def test_there_is_no_sample_without_the_whole_model_or_if_it_is_off(
    changes: dict[str, str], tmp_path: Path
) -> None:
    (root := tmp_path / "text.txt").write_text("to be or not to be " * 20)
    config = text_experiment(root, **changes)  # type: ignore[arg-type]
    source = build_source(config.data)
    assert TextSamples.of(config, source, make_task(config, source.info), next_letter) is None
