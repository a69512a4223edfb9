"""``load_model``: the module, classes and preprocessing of a run, without its data."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import hpc_train
from hpc_train.errors import BadFileError, UsageError
from hpc_train.experiment.config.training_sections import LoraConfig
from hpc_train.paths import RunPaths
from hpc_train.run import frozen_experiment
from hpc_train.training.checkpoint.inference import LoadedModel
from hpc_train.training.checkpoint.state import TrainingState
from hpc_train.training.datasets.base import DataSource
from hpc_train.training.datasets.batches import evaluation_batches
from hpc_train.training.datasets.normalize import Normalize
from hpc_train.training.datasets.sources.image_files import ImageFiles
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.models.building import build_model
from hpc_train.training.models.fine_tuning import add_lora
from hpc_train.training.train_state import Ema
from tests.checkpoint.checkpoint_runs import Trainee, begin_attempt
from tests.run.runs import small_run

COLORS = DataInfo(3, 3, (0.5, 0.4, 0.3), (0.2, 0.25, 0.5), class_names=("red", "green", "blue"))
LETTERS = DataInfo(4, 0, (), (), class_names=("a", "b", "\n"), sequence_length=8, ignore_index=-100)
VIT = {
    "model_type": "vit", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 8, "image_size": 32, "patch_size": 16,
}  # fmt: skip


class Net(nn.Module):
    """A normalization that must be in evaluation mode, and a layer that may have an adapter."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(12, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(nn.functional.adaptive_avg_pool2d(self.norm(images), 2).flatten(1))
        return scores


def make_run(folder: Path, info: DataInfo = COLORS, **changes: Any) -> tuple[RunPaths, nn.Module]:
    """Create a run with one checkpoint of random weights and the facts about data that are not there."""
    own = {"model": {"name": f"{__name__}:Net"}, "data": {"name": "imagefolder", "root": "/nonexistent"}}
    run = small_run(folder / "runs", **own | changes)
    begin_attempt(run, 1)
    model = build_model(frozen_experiment.read(run).model, info)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.normal_(1.0, 0.1).abs_()
    save(run, model, 3, {"info": asdict(info)})
    return run, model.eval()


def save(run: RunPaths, model: nn.Module, step: int, data: Any, averages: Any = None, **extra: Any) -> None:
    state = TrainingState(model, torch.optim.SGD(model.parameters(), 0.1))
    facts = {"num_samples": 9, "classes": "x"} | data
    Trainee().checkpointer(run).save(replace(state, averages=averages or {}), step, {"data": facts} | extra)


def loaded(run: RunPaths, **options: Any) -> LoadedModel:
    return hpc_train.load_model(run.folder, **options)


@pytest.mark.parametrize(
    "name", ["timm/test_vit", "torchvision/mobilenet_v3_small", "hf/", f"{__name__}:Net"]
)
def test_a_classifier_computes_what_the_runs_model_does(tmp_path: Path, name: str) -> None:
    if name == "hf/":
        pytest.importorskip("transformers")
        (tmp_path / "config.json").write_text(json.dumps(VIT))
        name = f"hf/{tmp_path}"
    run, model = make_run(tmp_path, model={"name": name})
    found = loaded(run)
    size = 32 if name.startswith("hf/") else 160
    images = torch.randn(2, 3, size, size)
    assert not found.module.training and found.class_names == ("red", "green", "blue") and found.step == 3
    assert torch.equal(found.module(images), model(images))


def test_a_language_model_encodes_and_decodes(tmp_path: Path) -> None:
    args = {"num_layers": 1, "num_heads": 2, "dim": 8}
    run, model = make_run(
        tmp_path,
        LETTERS,
        task="causal_lm",
        model={"name": "gpt", "args": args},
        data={"name": "tokens", "root": "/nonexistent", "args": {"length": 8}},
    )
    found = loaded(run)
    tokens = found.preprocess("ab\n", "bba")
    assert isinstance(tokens, Tensor) and tokens.tolist() == [[0, 1, 2], [1, 1, 0]]
    assert found.decode(tokens[0]) == "ab\n"
    assert torch.equal(found.module(tokens), model(tokens))
    with pytest.raises(UsageError, match="pass one text at a time"):
        found.preprocess("ab", "a")


def test_images_of_any_kind_are_prepared_as_in_an_evaluation(tmp_path: Path) -> None:
    data = {"name": "imagefolder", "root": "/nonexistent", "image_size": 8}
    run, _ = make_run(tmp_path, data=data | {"eval_crop": 0.8, "interpolation": "bicubic"})
    image = Image.effect_noise((20, 12), 90).convert("RGB")
    file = tmp_path / "image.jpg"
    image.save(file)
    found = loaded(run)
    experiment, info = found.experiment, found.data
    (batch,) = evaluation_batches(
        ImageFiles(file, 3), experiment.model_copy(update={"workers": 0}).with_micro_batch_size(1), 0, 1,
        torch.device("cpu"), has_targets=False,
    )  # fmt: skip
    assert batch is not None
    expected = Normalize(info, experiment.data)(batch.inputs)
    decoded = Image.open(file)
    pixels = torch.frombuffer(bytearray(decoded.tobytes()), dtype=torch.uint8).view(12, 20, 3)
    inputs = found.preprocess(file, str(file), decoded, pixels.permute(2, 0, 1))
    assert isinstance(inputs, Tensor) and inputs.shape == (4, 3, 8, 8)
    assert all(torch.equal(each, expected[0]) for each in inputs)
    with pytest.raises(BadFileError, match=r"none\.png"):
        found.preprocess(tmp_path / "none.png")


def test_images_unlike_those_of_the_training_cause_a_warning(tmp_path: Path) -> None:
    found = loaded(make_run(tmp_path, data={"name": "digits"})[0])
    as_trained = torch.zeros(3, 32, 32, dtype=torch.uint8)
    with warnings.catch_warnings(action="error"):
        found.preprocess(as_trained)
    with pytest.warns(UserWarning, match="have 8 × 8 and 32 × 32 pixels; resize them"):
        found.preprocess(as_trained[:, :8, :8])
    with pytest.warns(UserWarning, match="count as normalized; those of the training were uint8"):
        found.preprocess(as_trained.float())


def test_average_weights_are_loaded_if_the_best_is_chosen_by_them(tmp_path: Path) -> None:
    run, model = make_run(tmp_path / "a", optimization=_with_ema())
    ema = Ema(model, 0.5)
    averages = {name: value + 1 for name, value in ema.averages.items()}
    best = {"metric": "ema_accuracy", "value": 0.5, "step": 4}
    save(run, model, 4, {"info": asdict(COLORS)}, averages, best=best)
    found = loaded(run)
    assert found.is_ema and torch.equal(found.module.get_parameter("head.bias"), averages["head.bias"])
    plain = loaded(run, ema=False)
    assert torch.equal(plain.module.get_parameter("head.bias"), model.get_parameter("head.bias"))
    without, _ = make_run(tmp_path / "b")
    with pytest.raises(UsageError, match="has no average of its weights"):
        loaded(without, ema=True)


def test_the_best_checkpoint_is_loaded_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, model = make_run(tmp_path)
    assert (loaded(run).step, capsys.readouterr().err) == (3, "")
    save(run, model, 5, {"info": asdict(COLORS)}, best={"metric": "dice", "value": 0.5, "step": 3})
    assert loaded(run).step == 3
    assert "the best checkpoint, dice 0.5 at step 3 (best=False: step 5)" in capsys.readouterr().err
    assert loaded(run, best=False).step == hpc_train.Run(run.folder).checkpoint(best=False).step == 5
    assert "the last checkpoint, step 5 (the best: dice 0.5 at step 3)" in capsys.readouterr().err
    assert hpc_train.Run(run.folder).checkpoint().step == 3


def _with_ema() -> dict[str, Any]:
    optimizer = {"name": "sgd", "lr": 0.1}
    sizes = {"steps": 10, "global_batch_size": 8, "micro_batch_size": 4}
    return sizes | {"optimizer": optimizer, "ema": {"decay": 0.5}}


def test_adapters_are_merged(tmp_path: Path) -> None:
    lora = {"rank": 2, "targets": ["head"], "alpha": 6.0}
    run, model = make_run(tmp_path, model={"name": f"{__name__}:Net", "lora": lora})
    add_lora(model, LoraConfig.model_validate(lora))
    nn.init.normal_(model.get_parameter("head.lora_b"))
    save(run, model, 4, {"info": asdict(COLORS)})
    images = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(loaded(run).module(images), model(images))


def test_under_fp64_the_module_and_its_inputs_are_float64(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, precision="fp64")
    found = loaded(run)
    inputs = found.preprocess(torch.zeros(3, 4, 4, dtype=torch.uint8))
    assert isinstance(inputs, Tensor)
    assert found.module(inputs).dtype == inputs.dtype == torch.float64


def test_own_code_is_that_of_the_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if other code of the same name is imported, which stays so."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "net.py").write_text("from torch import nn\ndef make(): return nn.Linear(2, 2)\n")
    run, _ = make_run(tmp_path, model={"name": "net:make"})
    tree = tmp_path / "runs" / ".code" / "0123"
    (tree / "tree").mkdir(parents=True)
    (tree / "tree" / "net.py").write_text(
        "from torch import nn\nclass Mine(nn.Linear): pass\ndef make(): return Mine(2, 2)\n"
    )
    manifest = {"version": 1, "content": "0123", "files": {}, "links": {}, "cwd": "", "search_path": []}
    (tree / "snapshot.json").write_text(json.dumps(manifest))
    run.code.symlink_to(tree)
    import net  # type: ignore[import-not-found]

    assert type(loaded(run).module).__name__ == "Mine"
    assert type(loaded(run, code="new").module) is nn.Linear
    import net as again

    assert again is net and not any("tree" in entry for entry in __import__("sys").path)


def test_another_models_code_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = make_run(tmp_path)
    monkeypatch.setattr(Net, "head", None, raising=False)
    monkeypatch.setitem(globals(), "Net", lambda num_classes: nn.Linear(2, num_classes))
    with pytest.raises(BadFileError, match=r"is not the model of the checkpoint(.|\n)*head\.weight"):
        loaded(run)


def test_a_checkpoint_without_facts_reads_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, model = make_run(tmp_path)
    save(run, model, 4, {"mean": [0.1] * 3, "std": [0.9] * 3})
    source = DataSource([], None, COLORS)
    monkeypatch.setattr("hpc_train.training.datasets.building.build_source", lambda config: source)
    found = loaded(run)
    assert found.class_names == COLORS.class_names and found.data.mean == (0.1,) * 3


def test_forged_facts_are_refused(tmp_path: Path) -> None:
    run, model = make_run(tmp_path)
    save(run, model, 4, {"info": {"num_classes": "many"}})
    with pytest.raises(BadFileError, match="facts about the data are damaged"):
        loaded(run)


def test_it_is_shown_on_one_line(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path)
    shown = repr(loaded(run))
    assert shown.startswith(f"LoadedModel('{__name__}:Net', step=3,") and len(shown) < 120
