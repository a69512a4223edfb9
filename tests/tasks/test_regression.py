"""Regression: scikit-learn's metrics on the same predictions, exact over micro-batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpc_train.errors import BadFileError
from hpc_train.training.datasets.targets import MisfitError, TargetCheck
from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.tasks.regression import Regression
from tests.tasks import test_classification
from tests.tasks.test_classification import experiment


def task(loss: Any = None, shape: tuple[int, ...] = (3,)) -> Regression:
    given = experiment()
    changed = given.optimization.model_validate(given.optimization.model_dump() | {"loss": loss})
    info = DataInfo(math.prod(shape), 3, (0.5,) * 3, (0.5,) * 3, target_shape=shape)
    return Regression(given.model_copy(update={"optimization": changed}), info)


def batch(targets: Tensor, valid: Tensor | None = None) -> Batch:
    return test_classification.batch(targets, targets, valid)


def outputs_and_targets(size: int = 40, count: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    targets = 3 * torch.randn(size, count, generator=generator, dtype=torch.float64) + 5
    return targets + torch.randn(size, count, generator=generator, dtype=torch.float64), targets


def metrics(of: Regression, *parts: dict[str, Tensor]) -> dict[str, float]:
    totals = {name: sum((part[name] for part in parts[1:]), parts[0][name]) for name in parts[0]}
    return of.metrics({name: value.item() if value.dim() == 0 else value for name, value in totals.items()})


def test_metrics_are_scikit_learns_whatever_the_batches() -> None:
    from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

    outputs, targets = outputs_and_targets()
    parts = [task().sums(outputs[part], batch(targets[part])) for part in (slice(0, 17), slice(17, 40))]
    found = metrics(task(), *parts)
    assert found["mae"] == pytest.approx(mean_absolute_error(targets, outputs), rel=1e-12)
    assert found["rmse"] == pytest.approx(
        root_mean_squared_error(targets.ravel(), outputs.ravel()), rel=1e-12
    )
    assert found["r2"] == pytest.approx(r2_score(targets, outputs), rel=1e-12)
    assert found["loss"] == pytest.approx(functional.mse_loss(outputs, targets).item(), rel=1e-12)


@pytest.mark.parametrize("has_column", [False, True])
def test_one_number_may_have_a_column_or_not(has_column: bool) -> None:
    from sklearn.metrics import r2_score

    outputs, targets = outputs_and_targets(count=1)
    of, given = task(shape=()), outputs if has_column else outputs[:, 0]
    expected = functional.mse_loss(outputs, targets)
    torch.testing.assert_close(of.loss(given, batch(targets[:, 0])), expected, rtol=1e-12, atol=0)
    found = metrics(of, of.sums(given, batch(targets[:, 0])))
    assert found["r2"] == pytest.approx(r2_score(targets, outputs), rel=1e-12)


@pytest.mark.parametrize(
    ("loss", "function", "keys"),
    [
        ("mse", functional.mse_loss, {}),
        ("mae", functional.l1_loss, {}),
        ({"name": "huber", "args": {"delta": 0.5}}, functional.huber_loss, {"delta": 0.5}),
    ],
)
def test_losses_are_torchs(loss: Any, function: Any, keys: dict[str, float]) -> None:
    outputs, targets = outputs_and_targets()
    expected = function(outputs, targets, **keys)
    torch.testing.assert_close(task(loss).loss(outputs, batch(targets)), expected, rtol=1e-12, atol=0)


def test_samples_that_only_fill_up_count_for_nothing_even_if_nan() -> None:
    outputs, targets = outputs_and_targets()
    valid = torch.arange(40) % 7 > 0
    spoiled = torch.where(valid[:, None], outputs, math.nan)
    found = metrics(task(), task().sums(spoiled, batch(targets, valid)))
    expected = metrics(task(), task().sums(outputs[valid], batch(targets[valid])))
    assert found == pytest.approx(expected, rel=1e-12)


def test_equal_targets_have_no_r2() -> None:
    outputs, _ = outputs_and_targets()
    assert math.isnan(metrics(task(), task().sums(outputs, batch(torch.full((40, 3), 0.1))))["r2"])


def test_a_model_with_other_outputs_is_refused() -> None:
    outputs, targets = outputs_and_targets()
    with pytest.raises(BadFileError, match=r"outputs have .*\(40, 2\).*write model\.args: {num_classes: 3}"):
        task().loss(outputs[:, :2], batch(targets))


def test_classes_and_missing_values_are_no_numbers() -> None:
    for target in (3, math.nan, -math.inf):
        with pytest.raises(MisfitError, match=r"needs a number .finite floating-point numbers of .*; fix"):
            TargetCheck("regression", task(shape=()).target_spec).one(target)
