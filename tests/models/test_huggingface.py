"""Models of transformers: against the library if it is installed, and against a stand-in of what we call."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.models.building import build_model
from hpc_train.training.models.weights import report_of
from tests.parallelism.batches import INFO

TOKENS = DataInfo(32, 0, (), (), sequence_length=8)


class Settings(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Model(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.classifier = nn.Linear(4, settings.num_labels)

    def forward(self, inputs: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.classifier(inputs), hidden_states=None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Install a stand-in of transformers; return what is asked of it."""
    seen: list[tuple[Any, ...]] = []

    def settings(name: str, *, local_files_only: bool, trust_remote_code: bool) -> Settings:
        seen.append(("config", name, local_files_only, trust_remote_code))
        if name == "missing":
            raise OSError("not found")
        return Settings(num_channels=3, hidden_size=4, num_labels=2, vocab_size=16)

    def pretrained(
        name: str, *, config: Settings, local_files_only: bool, trust_remote_code: bool, **_: Any
    ) -> tuple[Model, Any]:
        assert trust_remote_code is False
        seen.append(("weights", name, local_files_only))
        count = config.vocab_size if hasattr(config, "use_cache") else config.num_labels
        mismatched = [("classifier.bias", (2,), (count,)), ("classifier.weight", (2, 4), (count, 4))]
        return Model(config), {"missing_keys": [], "mismatched_keys": mismatched}

    def of_settings(config: Settings, *, trust_remote_code: bool) -> Model:
        assert trust_remote_code is False
        return Model(config)

    kind = SimpleNamespace(from_config=of_settings, from_pretrained=pretrained)
    auto = {"AutoConfig": SimpleNamespace(from_pretrained=settings)}
    auto |= dict.fromkeys(("AutoModelForImageClassification", "AutoModelForCausalLM"), kind)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(**auto))  # type: ignore[arg-type]
    return seen


def build(
    name: str = "hf/org/net", info: DataInfo = INFO, *, download: bool = False, **keys: Any
) -> nn.Module:
    return build_model(ModelConfig(name=name, **keys), info, download=download)


def test_the_forward_returns_logits_and_names_are_the_librarys(calls: list[Any]) -> None:
    model = build(args={"hidden_size": 8})
    assert model(torch.rand(2, 4)).shape == (2, INFO.num_classes)
    assert set(model.state_dict()) == {"classifier.weight", "classifier.bias"}
    found = model.settings
    assert isinstance(found, Settings) and (found.hidden_size, found.num_channels) == (8, 1)
    assert calls == [("config", "org/net", True, False)]


def test_the_vocabulary_holds_the_datas_tokens(calls: list[Any]) -> None:
    found = build(info=TOKENS).settings
    assert isinstance(found, Settings) and (found.vocab_size, found.use_cache) == (32, False)


def test_a_classifier_has_the_classes_that_the_task_reads(calls: list[Any]) -> None:
    assert build(args={"num_classes": 12})(torch.rand(2, 4)).shape == (2, 12)
    assert build(args={"num_labels": INFO.num_classes})(torch.rand(2, 4)).shape == (2, INFO.num_classes)
    with pytest.raises(BadFileError, match=r"^model\.args: sets 12 labels, .* . classes; write num_c.*: 12"):
        build(args={"num_labels": 12})


def test_only_prepare_uses_the_network(calls: list[Any]) -> None:
    for download in (False, True):
        model = build(pretrained=True, download=download)
    assert [call[2] for call in calls] == [True, True, False, False]
    report = report_of(model)
    assert report is not None and report.missing == ("classifier.bias", "classifier.weight")


def test_mistakes_are_named(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadFileError, match=r"^model.name: hf/missing .* not found; name a folder"):
        build("hf/missing")
    with pytest.raises(BadFileError, match=r"^model.args: hf/org/net has no setting 'layers'"):
        build(args={"layers": 3})
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BadFileError, match=r"pip install 'hpc-train\[hf\]'"):
        build()


def vit(folder: Path) -> str:
    """Save a small model of the library as a folder; return its name in a file."""
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    settings = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, image_size=16,
        patch_size=8, num_channels=1, num_labels=4,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.AutoModelForImageClassification.from_config(settings).save_pretrained(folder / "vit")
    return f"hf/{folder / 'vit'}"


@pytest.mark.slow
def test_a_folders_weights_are_loaded(tmp_path: Path) -> None:
    """Training is compared with plain PyTorch in tests/parallelism/test_tasks.py."""
    name = vit(tmp_path)
    from transformers import AutoModelForImageClassification

    expected = AutoModelForImageClassification.from_pretrained(tmp_path / "vit", dtype="float32")
    model = build(name, pretrained=True).eval()
    images = torch.randn(2, 1, 16, 16)
    assert torch.equal(model(images), expected.eval()(images).logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "channels", "cause"),
    [
        (
            {"image_size": 32},
            1,
            "its position embeddings are of another image .* another shape vit.embed",
        ),
        ({}, 3, r"another number of input channels; .*\(16, 1, 8, 8\) instead of \(16, 3, 8, 8\)"),
        ({"intermediate_size": 64}, 1, "common tensors have another size"),
    ],
)
def test_weights_of_other_shapes_do_not_become_random(
    tmp_path: Path, args: dict[str, Any], channels: int, cause: str
) -> None:
    info = replace(INFO, channels=channels)
    with pytest.raises(BadFileError, match=rf"^model\.pretrained: hf/.* does not fit the model: .*{cause}"):
        build(vit(tmp_path), info, pretrained=True, args=args)


def test_a_larger_vocabulary_does_not_become_random(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadFileError, match="it is for another number of tokens or classes"):
        build(info=TOKENS, pretrained=True)


def refusal(folder: Path, *, pretrained: bool = False, **settings: Any) -> str:
    """Return the error for a folder with this configuration and code of its own."""
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "theirs.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()")
    with pytest.raises(BadFileError) as error:
        build(f"hf/{folder}", TOKENS, pretrained=pretrained)
    assert not (folder / "ran").exists()
    return str(error.value)


@pytest.mark.slow
def test_code_that_comes_with_a_model_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail(f"asked: {prompt}"))
    model, config = {"AutoModelForCausalLM": "theirs.Model"}, {"AutoConfig": "theirs.Config"}
    for known in ({"model_type": "t5", "auto_map": model}, {"model_type": "theirs", "auto_map": config}):
        assert "auto_map in its config.json), which is never run" in refusal(tmp_path, **known)
    weights = refusal(tmp_path, pretrained=True, model_type="t5", auto_map=model)
    assert "which is never run" in weights
    kernel = refusal(tmp_path, model_type="llama", attn_implementation="someone/kernel")
    assert "names an attention kernel of the hub, someone/kernel" in kernel
