from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.tasks.classification import Classification
from tests.experiments import tiny_experiment


def experiment(label_smoothing: float = 0.0, **model: Any) -> Experiment:
    return tiny_experiment({"label_smoothing": label_smoothing}, model={"name": "timm/resnet18", **model})


def task(num_classes: int = 7, label_smoothing: float = 0.0, **model: Any) -> Classification:
    info = DataInfo(num_classes, 3, (0.5,) * 3, (0.5,) * 3)
    return Classification(experiment(label_smoothing, **model), info)


def batch(logits: Tensor, targets: Tensor, valid: Tensor | None = None) -> Batch:
    """Return a batch whose inputs are the logits."""
    valid = torch.ones(len(targets), dtype=torch.bool) if valid is None else valid
    return Batch(0, 0, 1.0, logits, targets, valid)


def logits_and_targets(size: int, num_classes: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(size, num_classes, generator=generator)
    return logits, torch.randint(num_classes, (size,), generator=generator)


def sums(of: Classification, given: Batch) -> dict[str, float]:
    """Return the sums that are numbers."""
    found = of.sums(given.inputs, given)
    return {name: value.item() for name, value in found.items() if value.dim() == 0}


def test_loss_is_cross_entropy_with_label_smoothing() -> None:
    logits, targets = logits_and_targets(6)
    found = task(label_smoothing=0.1).loss(logits, batch(logits, targets))
    assert torch.equal(found, functional.cross_entropy(logits, targets, label_smoothing=0.1))


@pytest.mark.parametrize(
    ("given", "computed"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_loss_is_computed_in_float32_or_wider(given: torch.dtype, computed: torch.dtype) -> None:
    logits, targets = logits_and_targets(6)
    logits = logits.to(given).requires_grad_()
    found = task().loss(logits, batch(logits, targets))
    assert found.dtype == computed
    assert torch.equal(found, functional.cross_entropy(logits.to(computed), targets))
    found.backward()
    assert logits.grad is not None


def test_all_sums_but_the_confusion_matrix_are_float64_scalars() -> None:
    given = batch(*logits_and_targets(4))
    found = task().sums(given.inputs, given)
    assert found.pop("confusion").dtype == torch.int64
    assert all(value.dtype == torch.float64 and value.shape == () for value in found.values())


def test_samples_that_only_fill_up_count_for_nothing_even_if_nan() -> None:
    logits, targets = logits_and_targets(6)
    valid = torch.tensor([True, True, False, True, False, True])
    spoiled = logits.clone()
    spoiled[~valid] = float("nan")
    assert sums(task(), batch(spoiled, targets, valid)) == sums(task(), batch(logits[valid], targets[valid]))


def test_the_confusion_matrix_is_scikit_learns() -> None:
    from sklearn.metrics import confusion_matrix

    logits, targets = logits_and_targets(60)
    valid = torch.arange(60) % 7 > 0
    given = batch(logits, targets, valid)
    found = task().sums(logits, given)["confusion"]
    expected = confusion_matrix(targets[valid], logits.argmax(1)[valid], labels=range(7))
    assert found.tolist() == expected.tolist()
    table = task().files({"confusion": found})["confusion_matrix.csv"].decode().splitlines()
    assert table[0] == "class,0,1,2,3,4,5,6"
    assert table[3] == ",".join(map(str, [2, *expected[2]]))


def test_the_confusion_matrix_has_the_names_of_the_classes() -> None:
    info = DataInfo(2, 3, (0.5,) * 3, (0.5,) * 3, class_names=("cat", 'the "dog", wet'))
    found = Classification(experiment(), info).files({"confusion": torch.tensor([[3, 1], [0, 2]])})
    assert found["confusion_matrix.csv"] == b'class,cat,"the ""dog"", wet"\ncat,3,1\n"the ""dog"", wet",0,2\n'


def test_many_classes_have_no_confusion_matrix() -> None:
    logits, targets = logits_and_targets(2, 1001)
    found = task(1001).sums(logits, batch(logits, targets))
    assert "confusion" not in found and task(1001).files(found) == {}


def test_a_validation_loss_is_the_mean_over_the_class_weights() -> None:
    weights = [0.5, 3.0, 0.0, 1.0, 1.0, 2.0, 1.0]
    given = experiment().model_dump()
    given["optimization"]["loss"] = {"name": "cross_entropy", "args": {"class_weights": weights}}
    weighted = Classification(Experiment.model_validate(given), DataInfo(7, 3, (0.5,) * 3, (0.5,) * 3))
    logits, targets = logits_and_targets(20)
    expected = functional.cross_entropy(logits, targets, torch.tensor(weights)).item()
    valid = torch.arange(24) < 20
    padded = batch(torch.cat([logits, logits[:4]]), torch.cat([targets, targets[:4]]), valid)
    assert weighted.metrics(sums(weighted, padded))["loss"] == pytest.approx(expected, rel=1e-6)
    nothing = batch(logits, torch.full_like(targets, 2))  # the class of weight 0
    assert weighted.metrics(sums(weighted, nothing))["loss"] == 0.0


def test_batches_merge_to_the_metrics_of_the_whole() -> None:
    logits, targets = logits_and_targets(12)
    of, slices = task(label_smoothing=0.3), (slice(0, 5), slice(5, 12))
    parts = [sums(of, batch(logits[part], targets[part])) for part in slices]
    merged = {name: sum(part[name] for part in parts) for name in parts[0]}
    metrics = task().metrics(merged)
    assert metrics["accuracy"] == (logits.argmax(1) == targets).double().mean().item()
    assert metrics["loss"] == pytest.approx(functional.cross_entropy(logits, targets).item(), rel=1e-6)
    ranked = zip(logits.argsort(dim=1, descending=True), targets, strict=True)
    assert metrics["accuracy_top5"] == sum(int(target in row[:5]) for row, target in ranked) / 12
    assert metrics.keys() == {"loss", "accuracy", "accuracy_top5"}


@pytest.mark.parametrize(("own", "num_classes"), [({}, 2), ({}, 5), ({"args": {"num_classes": 3}}, 3)])
def test_top5_is_omitted_where_it_is_meaningless(own: dict[str, Any], num_classes: int) -> None:
    """The model's own number of classes decides."""
    of = task(10 if own else num_classes, **own)
    found = sums(of, batch(*logits_and_targets(4, num_classes)))
    assert found.keys() == {"count", "loss", "correct"}
    assert of.metrics(found).keys() == {"loss", "accuracy"}


def test_class_numbers_are_those_of_the_models_head() -> None:
    assert str(task(10).target_spec) == "a class number (integers of shape (), at least 0, at most 9)"
    assert task(10, args={"num_classes": 1000}).target_spec.maximum == 999


@pytest.mark.parametrize(
    "section",
    [
        {"checkpoint": {"best": {"metric": "accuracy_top5"}}},
        {"early_stopping": {"metric": "ema_accuracy_top5"}},
    ],
)
def test_top5_of_five_classes_can_not_be_followed(section: dict[str, Any]) -> None:
    ((key, value),) = section.items()
    followed = {"mode": "max", **value.get("best", value)}
    value = {"best": followed} if "best" in value else {**followed, "patience": 1}
    file = Experiment.model_validate({**experiment().model_dump(), key: value})
    with pytest.raises(BadFileError, match=rf"^{key}.*metric: accuracy_top5 needs more than 5 classes"):
        Classification(file, DataInfo(5, 3, (0.5,) * 3, (0.5,) * 3))
    Classification(file, DataInfo(6, 3, (0.5,) * 3, (0.5,) * 3))


def test_a_prediction_of_an_output_without_a_class_is_its_number() -> None:
    info = DataInfo(2, 3, (0.5,) * 3, (0.5,) * 3, class_names=("cat", "dog"))
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    (found,) = Classification(experiment(), info).predictions(logits, batch(logits, torch.tensor([1])))
    assert [entry["class"] for entry in found["top"]] == [2, "dog", "cat"]
