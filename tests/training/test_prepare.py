"""``hpc-train prepare`` reads samples as ranks do, so that what it accepts trains."""

from __future__ import annotations

import re
import resource
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from hpc_train.errors import BadFileError, UserError
from hpc_train.experiment.config.schema import DataConfig, EarlyStoppingConfig, Experiment
from hpc_train.experiment.data_facts.built_in import DATA_SETS
from hpc_train.experiment.data_facts.facts import DataFacts
from hpc_train.run import resource_limits
from hpc_train.training import trial_step
from hpc_train.training.datasets.base import DataSource
from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.prepare import described_target, main, prepare
from hpc_train.training.tasks.classification import Classification
from tests.experiments import tiny_experiment

HERE = "tests.training.test_prepare"
DEEP = f"{HERE}:deep"


class Samples:
    """Forty samples with the shape of input and the target that the file asks for; ``odd`` is sample 39's."""

    num_classes = 3

    def __init__(self, shape: Sequence[int], target: Any = 0, odd: Any = None) -> None:
        self._inputs = torch.rand(40, *shape)
        self._targets = [target] * 39 + [target if odd is None else odd]

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int, /) -> tuple[Tensor, Any]:
        return self._inputs[index], self._targets[index]


def images(target: Any = 0, odd: Any = None) -> Any:
    return Samples((1, 4, 4), target, odd), None


def features(dims: int = 1) -> DataSource:
    return DataSource(Samples((8,) * dims), Samples((8,) * dims), DataInfo(3, 8, (0.5,) * 8, (0.5,) * 8))


def validation(target: Any) -> Any:
    return Samples((1, 4, 4)), Samples((1, 4, 4), target)


def without_statistics() -> DataSource:
    return DataSource(Samples((1, 4, 4)), None, DataInfo(3, 1, (), ()))


def net(num_classes: int, inputs: int = 16) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, num_classes))


class OnlyTrains(nn.Module):
    """Fails in evaluation mode."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = net(num_classes)

    def forward(self, images: Tensor) -> Tensor:
        if not self.training:
            raise KeyError("ema")
        return self.layers(images)


class Detached(OnlyTrains):
    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).detach()


class WithUnusedLayer(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers, self.spare = net(num_classes), nn.Linear(1, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class NeedsMemory(OnlyTrains):
    def forward(self, images: Tensor) -> Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")


class ReadsItsWeights(nn.Module):
    """Can't be built on the meta device, as it looks at its own weights."""

    def __init__(self, num_classes: int, elements: int = 51) -> None:
        super().__init__()
        self.layers = net(num_classes)
        self.read = bytearray(elements)
        self.largest = self.layers[1].weight.max().item()

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


@cache
def kept_net(num_classes: int) -> Any:
    return net(num_classes)


class LossPerSample(Classification):
    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.sum(1)


def deep(what: str, depth: int = 12) -> Any:
    """Raise where Python's whole traceback would fill the screen."""
    if depth:
        return deep(what, depth - 1)
    raise FileNotFoundError(what) if what == "weights.pth" else KeyError(what)


class CantBeBuilt(Classification):
    def __init__(self, experiment: Experiment, info: DataInfo) -> None:
        deep("task")


def by(optimizer: str, **keys: Any) -> dict[str, Any]:
    """Return the sections of a file that trains by this optimizer."""
    return {"optimization": {"optimizer": {"name": optimizer, "lr": 0.1, **keys}}}


def exp_file(folder: Path, model: str) -> str:
    """Write a file that trains ``model`` by muon; return its path."""
    (folder / "exp.yaml").write_text(
        f"name: x\ntask: classification\nmodel: {{name: '{model}'}}\ndata: {{name: '{HERE}:images'}}\n"
        "optimization:\n  steps: 1\n  global_batch_size: 4\n  micro_batch_size: 4\n"
        "  optimizer: {name: muon, lr: 0.1}\n"
    )
    return str(folder / "exp.yaml")


def experiment(factory: str, args: dict[str, Any], **keys: Any) -> Experiment:
    sizes = {"steps": 1, "global_batch_size": 8, "micro_batch_size": 2}
    data = {"name": f"{HERE}:{factory}", "args": args, **keys.pop("data", {})}
    optimization = sizes | keys.pop("optimization", {})
    return tiny_experiment(optimization, **{"model": {"name": f"{HERE}:net"}, "data": data} | keys)


@pytest.mark.parametrize(
    ("factory", "args", "keys", "words"),
    [
        ("images", {"target": 0.37}, {}, r"^data: sample 0 has the target 0\.37\d* .*task classification"),
        ("images", {"odd": 3}, {}, r"^data: sample 39 has the target 3 .*at most 2\); fix"),
        ("validation", {"target": 0.37}, {}, r"^data: validation sample 0 has the target 0\.37"),
        ("features", {"dims": 4}, {}, r"^data: sample 0 can't be read: .* of shape \(8, 8, 8, 8\)"),
        ("features", {}, {"data": {"image_size": 4}}, r"^data\.image_size: is for images"),
        ("without_statistics", {}, {}, r"^data\.normalize\.mean: \[\] has 0 values"),
        ("images", {}, {"optimization": {"global_batch_size": 48}}, r"global_batch_size: 48 is more"),
        ("images", {}, by("muon"), r"name: muon updates matrices only, and 1 of the 2 .* 1\.bias of shape"),
        ("images", {}, by("adamw", args={"betas": [0.9]}), r"args: adamw can't be built: IndexError: "),
        ("images", {}, by("nadam", args={"capturable": True}), r"optimizer: nadam can't update the w"),
        ("images", {}, by("adamw", groups=[{"match": ["head.*"], "lr_factor": 2}]), r"head.* matches no"),
        ("images", {}, {"optimization": {"schedule": {"name": "cosine", "warmup_steps": 1}}}, r"warm-up"),
        ("images", {}, {"model": {"name": f"{HERE}:Detached"}}, r"can't compute the gradients of the loss"),
        ("images", {}, {"activation_checkpointing": "blocks"}, r"^activation_checkpointing: "),
    ],
)
def test_prepare_refuses_what_ranks_would_refuse(
    factory: str, args: dict[str, Any], keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadFileError, match=words):
        prepare([experiment(factory, args, **keys)])


def test_prepare_tries_each_optimizer_of_a_sweep_once(capsys: pytest.CaptureFixture[str]) -> None:
    optimizers = [{"name": "sgd", "lr": 0.1}, {"name": "sgd", "lr": 0.2}, {"name": "adamw", "lr": 0.1}]
    prepared = prepare([experiment("images", {}, optimization={"optimizer": each}) for each in optimizers])
    printed = capsys.readouterr().err
    assert [printed.count(f"trying a step of {name} ") for name in ("sgd", "adamw")] == [1, 1]
    assert len(prepared.models) == printed.count("51 parameters") == 1


def test_prepare_names_weights_that_the_loss_does_not_use(capsys: pytest.CaptureFixture[str]) -> None:
    model = {"name": f"{HERE}:WithUnusedLayer"}
    finds = {"args": {"find_unused_parameters": True}}
    prepare([experiment("images", {}, model=model), experiment("images", {}, model=model, parallel=finds)])
    assert (
        capsys.readouterr().err.count("will refuse it: the loss does not use spare.weight, spare.bias") == 1
    )


def test_problems_of_prepare_have_their_position(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = exp_file(tmp_path, f"{HERE}:net")
    assert main([file]) == 65
    assert f"{file}:9:21: optimization.optimizer.name: muon" in capsys.readouterr().err
    assert main([file, f"model.name={HERE}:Detached", "optimization.optimizer.name=sgd"]) == 65
    assert f"\ncommand line: model.name: {HERE}:Detached and" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "data", "text"),
    [
        ("classification", "imagefolder", ", 3 classes"),
        ("classification", f"{HERE}:images", ", 3 classes"),
        ("regression", f"{HERE}:images", ", each with a number to predict"),
        ("segmentation", "segmentation_folder", ", with masks of 3 classes"),
        ("detection", "coco", ", with boxes of 3 classes"),
        ("causal_lm", "text", " of 64 tokens, from a vocabulary of 3"),
        ("tests.training.test_prepare:LossPerSample", f"{HERE}:images", ", 3 classes"),
    ],
)
def test_samples_are_described_in_the_words_of_the_task(task: str, data: str, text: str) -> None:
    named = tiny_experiment({}, task=task).model_copy(update={"data": DataConfig(name=data)})
    assert described_target(named, DataInfo(3, 0, (), (), sequence_length=64)) == text


def test_prepare_accepts_rows_of_features(capsys: pytest.CaptureFixture[str]) -> None:
    prepare([experiment("features", {}, model={"name": f"{HERE}:net", "args": {"inputs": 8}})])
    assert "40 training and 40 validation samples, 3 classes" in capsys.readouterr().err


def test_prepare_names_samples_that_would_be_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    prepare([experiment("images", {"odd": 0.37}, data={"on_bad_sample": "skip"})])
    said = capsys.readouterr().err
    assert "data: can't be used, another sample will replace it: sample 39: it has the target 0.37" in said


def test_a_shape_error_of_the_users_model_is_shown_with_the_users_frames() -> None:
    wrong = {"name": "tests.models.factories:Convolutional", "args": {"features": 9}}
    with pytest.raises(BadFileError) as error:
        prepare([experiment("images", {}, model=wrong)])
    first, *_ = lines = str(error.value).splitlines()
    assert first == "Traceback of your code (most recent call last):"
    assert lines[1].endswith("in forward") and "tests/models/factories.py" in lines[1]
    assert "self.head(" in lines[2] and lines[3].startswith("RuntimeError: ")
    assert lines[4] == (
        "model.name: tests.models.factories:Convolutional and task classification can't compute the loss of "
        f"training samples of {HERE}:images (inputs of shape (2, 1, 4, 4)); fix the one that raised this, or "
        "write --no-forward if it only works on a GPU"
    )


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        (
            {"data": {"name": f"{HERE}:deep", "args": {"what": "x"}}},
            "KeyError: 'x'",
            f"data.name: {HERE}:deep",
        ),
        ({"task": "cant_be_built"}, "KeyError: 'task'", "task: cant_be_built"),
        (
            {"model": {"name": f"{HERE}:deep", "args": {"what": "y"}}},
            "KeyError: 'y'",
            f"model.name: {HERE}:deep",
        ),
        (
            {"model": {"name": DEEP, "args": {"what": "weights.pth"}}},
            "FileNotFoundError: weights.pth",
            f"model.name: {DEEP}",
        ),
    ],
    ids=["data", "task", "model", "OSError"],
)
def test_an_error_of_a_users_factory_is_shown_with_the_users_frames(
    keys: dict[str, Any], error: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_ins = {"tasks": {"cant_be_built": f"{HERE}:CantBeBuilt"}}
    monkeypatch.setattr("hpc_train.registry._plug_ins", lambda kind: plug_ins.get(kind, {}))
    with pytest.raises(BadFileError) as caught:
        prepare([experiment("images", {}, **keys)])
    first, *_, said, last = lines = str(caught.value).splitlines()
    assert first == "Traceback of your code (most recent call last):" and len(lines) <= 15
    assert "test_prepare.py" in lines[1] and said == error
    assert last == f"{words} raised this while it was built; fix it there"


class CantBeCounted(Samples):
    def __len__(self) -> int:
        raise KeyError("rows")


def can_not_be_counted() -> Any:
    return CantBeCounted((1, 4, 4)), None


def no_statistics() -> nn.Module:
    return BadNames()


class BadNames(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 3)

    def named_parameters(self, *arguments: Any, **keys: Any) -> Any:
        raise KeyError("names")


@pytest.mark.parametrize(
    ("key", "value", "error"), [("data", "can_not_be_counted", "rows"), ("model", "no_statistics", "names")]
)
def test_an_error_of_users_code_ends_prepare_with_the_users_frames(
    key: str, value: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever raises it: here the number of samples, and the names of parameters."""
    file = exp_file(tmp_path, DEEP)
    assert main([file, f"{key}.name={HERE}:{value}", "optimization.optimizer.name=sgd"]) == 65
    output = capsys.readouterr()
    lines = (output.out + output.err).splitlines()
    assert "Traceback of your code (most recent call last):" in lines and f"KeyError: '{error}'" in lines
    assert not any("hpc_train/" in line for line in lines) and lines[-1].endswith("; fix it there")


def test_an_error_of_the_network_has_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says all by itself, and ``main`` prints it alone."""
    offline = OSError("no network")
    monkeypatch.setattr("hpc_train.training.prepare.build_source", Mock(side_effect=offline))
    with pytest.raises(OSError, match=r"^no network$") as caught:
        prepare([experiment("images", {})])
    assert caught.value is offline


def test_an_error_of_evaluation_alone_is_found_too() -> None:
    model = {"name": f"{HERE}:OnlyTrains"}
    with pytest.raises(BadFileError, match=r"(?s)KeyError: 'ema'.*compute the sums of validation samples"):
        prepare([experiment("validation", {"target": 0}, model=model)])
    prepare([experiment("images", {}, model=model)])  # which is not evaluated


def test_a_loss_that_is_no_mean_is_refused_as_by_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_ins = {"tasks": {"per_sample": f"{HERE}:LossPerSample"}}
    monkeypatch.setattr("hpc_train.registry._plug_ins", lambda kind: plug_ins.get(kind, {}))
    with pytest.raises(BadFileError, match=r"^task: loss returned shape \(2,\); return the mic"):
        prepare([experiment("images", {}, task="per_sample")])


def test_a_model_is_not_run_where_memory_does_not_suffice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare([experiment("images", {}, model={"name": f"{HERE}:NeedsMemory"})])
    assert "NeedsMemory: not run on samples: the memory that is free here does not" in capsys.readouterr().err
    free = iter((204, 203))  # before and after 51 parameters of 4 bytes
    monkeypatch.setattr(trial_step, "free_bytes", lambda: next(free))
    prepare([experiment("images", {"target": 2})])
    said = capsys.readouterr().err
    assert "net: not run on samples: its weights have 0.0 GB, and 0.0 GB" in said
    assert said.endswith("; unchecked until the ranks start: shapes, dtypes, loss and metrics\n")


def test_a_model_larger_than_the_memory_is_not_built(capsys: pytest.CaptureFixture[str]) -> None:
    """The weights have 6.6 TB: to allocate them fails."""
    prepare([experiment("images", {}, model={"name": f"{HERE}:net", "args": {"inputs": 1 << 39}})])
    (said,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("model"))
    assert re.fullmatch(
        rf"model {HERE}:net: not built: its weights have 6597\.1 GB, and [0-9.]+ GB of memory are free here; "
        r"unchecked until the ranks start: whether it can be built, shapes, dtypes, loss and metrics",
        said,
    )


def test_weights_that_do_not_fit_the_memory_are_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_step, "free_bytes", lambda: 1000)
    monkeypatch.setattr("hpc_train.training.prepare.planned_weight_bytes", lambda config, info: 1001)
    with pytest.raises(UserError, match=r"^model\.pretrained: .* timm/resnet18 are not fetched: it"):
        prepare([experiment("images", {}, model={"name": "timm/resnet18", "pretrained": True})])


def test_a_model_that_can_not_be_built_on_meta_is_limited_to_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trial_step, "free_bytes", lambda: 64 << 20)
    prepare([experiment("images", {}, model={"name": f"{HERE}:ReadsItsWeights"})])
    assert "ReadsItsWeights: 51 parameters" in capsys.readouterr().err
    before = resource.getrlimit(resource.RLIMIT_DATA)
    too_large = {"name": f"{HERE}:ReadsItsWeights", "args": {"elements": 256 << 20}}
    prepare([experiment("images", {}, model=too_large)])
    said = capsys.readouterr().err
    assert "ReadsItsWeights: not built: the memory that is free here does not suffice; unchecked" in said
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_free_memory_is_that_of_the_tightest_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_machine = trial_step.free_bytes()
    assert 0 < of_machine <= int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    monkeypatch.setattr(resource_limits, "_CGROUPS", tmp_path)
    for folder, (limit, use, reclaimed) in zip(
        (tmp_path, tmp_path / "memory"), trial_step._CGROUP_FILES, strict=True
    ):
        folder.mkdir(exist_ok=True)
        for name, text in ((limit, "5000000\n"), (use, "4000000\n")):
            (folder / name).write_text(text)
        (folder / "memory.stat").write_text(f"anon 1\n{reclaimed} 250000\n")
    assert trial_step.free_bytes() == 1_250_000


def test_what_a_model_keeps_from_its_measurement_is_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    prepare([experiment("images", {}, model={"name": f"{HERE}:kept_net"})])
    assert "kept_net: 51 parameters" in capsys.readouterr().err
    assert kept_net(3)[1].weight.device.type == "cpu"


def test_no_forward_does_not_run_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "exp.yaml"
    given = experiment("images", {}, model={"name": f"{HERE}:net", "args": {"inputs": 9}})
    file.write_text(given.model_dump_json(exclude_defaults=True))
    assert main([str(file)]) == 65
    assert "can't compute the loss of training samples" in capsys.readouterr().err
    assert main([str(file), "--no-forward", "seed=3"]) == 0


@pytest.mark.parametrize(("planned", "warnings"), [(40, 0), (48, 1)])
def test_facts_with_a_wrong_number_of_samples_are_reported(
    planned: int, warnings: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``plan`` has shown the wrong number of steps, though training does not use it."""
    facts = DataFacts("images", num_samples=lambda data: planned, implementation=f"{HERE}:plugged_in")
    monkeypatch.setitem(DATA_SETS, "forty", facts)
    prepare([experiment("images", {}, data={"name": "forty"})])
    found = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("data.name: forty has 40")
    ]
    assert len(found) == warnings


def plugged_in(rest: str, config: DataConfig, *, download: bool) -> DataSource:
    return DataSource(Samples((1, 4, 4)), None, DataInfo(3, 1, (0.5,), (0.5,)))


def test_prepare_packs_a_folder_once_for_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(8):
        path = tmp_path / f"images/train/class{number % 2}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(path)
    data = {
        "name": "imagefolder",
        "root": str(tmp_path / "images"),
        "cache": str(tmp_path / "packs"),
        "args": {},
    }
    flips = [{"hflip": probability} for probability in (0.1, 0.2)]
    model = {"name": f"{HERE}:net", "args": {"inputs": 48}}
    prepare([experiment("", {}, data={**data, "augment": flip}, model=model) for flip in flips])
    (pack,) = (tmp_path / "packs").iterdir()
    said = capsys.readouterr().err
    assert said.count(f"data.cache: {pack}: ") == said.count("bytes written") == 1


@pytest.mark.parametrize(
    ("factory", "metric", "words"),
    [
        ("validation", "miou", r"early_stopping.metric: miou is not a metric .* accuracy, loss$"),
        ("images", "loss", "has no validation data to evaluate"),
    ],
)
def test_prepare_finds_a_metric_that_evaluations_do_not_have(factory: str, metric: str, words: str) -> None:
    stopping = EarlyStoppingConfig(metric=metric, mode="max", patience=2)
    given = experiment(factory, {"target": 0}).model_copy(update={"early_stopping": stopping})
    with pytest.raises(BadFileError, match=words):
        prepare([given])
