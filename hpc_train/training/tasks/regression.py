# ruff: noqa: N806  (shape suffixes)
"""``task: regression``: one number per sample, or K at once.

Legend: B samples, K numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.training_sections import LossConfig
from hpc_train.experiment.data_facts.facts import REGRESSION_LOSSES, HuberArgs
from hpc_train.training.datasets.types import FINITE, Batch, DataInfo, TargetSpec
from hpc_train.training.tasks.base import Task, at_least_float32


class Regression(Task):
    """Outputs (B, K), or (B,) if K is 1, against targets of shape () or (K,) per sample."""

    def __init__(self, experiment: Experiment, info: DataInfo) -> None:
        self._losses = _make_loss(experiment.optimization.loss)
        self.target_spec = TargetSpec(
            "a number" if info.target_shape == () else "a vector of numbers",
            kind="float",
            shape=info.target_shape,
            minimum=-FINITE,
            maximum=FINITE,
        )

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss over the samples and their numbers."""
        outputs_BK, targets_BK = _pair(outputs, batch.targets)
        return self._losses(outputs_BK, targets_BK).mean()

    def sums(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return ``count``, the sum ``loss`` of the samples' means, and sums for each number, (K,).

        The sums are those of the absolute and squared errors, of the targets and of their squares.
        """
        outputs_BK, targets_BK = (values.double() for values in _pair(outputs, batch.targets))
        errors_BK = outputs_BK - targets_BK
        summed = {
            "absolute_error": errors_BK.abs(),
            "squared_error": errors_BK.square(),
            "target": targets_BK,
            "squared_target": targets_BK.square(),
        }
        # No product with ``valid``: the values of a padding sample may be NaN.
        valid_B1, zero = batch.valid[:, None], torch.zeros_like(errors_BK)
        losses_B = self._losses(outputs_BK, targets_BK).mean(dim=1)
        return {
            "count": batch.valid.sum(dtype=torch.float64),
            "loss": torch.where(batch.valid, losses_B, zero[:, 0]).sum(),
            **{name: torch.where(valid_B1, values, zero).sum(0) for name, values in summed.items()},
        }

    def predictions(self, outputs: Tensor, batch: Batch) -> list[dict[str, Any]]:
        """Return the ``prediction`` for each sample: one number, or a list of K."""
        rows = outputs.double().reshape(len(outputs), -1).tolist()
        return [{"prediction": row[0] if len(row) == 1 else row} for row in rows]

    def metrics(self, sums: dict[str, Any]) -> dict[str, float]:
        """Return ``loss``, ``mae``, ``rmse`` over all numbers and ``r2``, the mean of each number's R².

        R² is 1 - squared errors / squared deviations of the targets from their mean; NaN if all targets are
        equal.
        """
        count, squared_errors_K = sums["count"], sums["squared_error"]
        deviations_K = sums["squared_target"] - sums["target"].square() / count
        # Rounding errors leave a small deviation if all targets are equal.
        varies_K = deviations_K > 1e-12 * sums["squared_target"]
        r2_K = torch.where(varies_K, 1 - squared_errors_K / deviations_K, math.nan)
        return {
            "loss": sums["loss"] / count,
            "mae": sums["absolute_error"].mean().item() / count,
            "rmse": math.sqrt(squared_errors_K.mean().item() / count),
            "r2": r2_K.mean().item(),
        }


def _make_loss(config: LossConfig | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of outputs and targets (B, K) that returns the losses (B, K)."""
    config = config or LossConfig(name="mse")
    args = REGRESSION_LOSSES[config.name].model_validate(config.args)
    if isinstance(args, HuberArgs):
        return partial(functional.huber_loss, delta=args.delta, reduction="none")
    plain = functional.mse_loss if config.name == "mse" else functional.l1_loss
    return partial(plain, reduction="none")


def _pair(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and targets as (B, K), at least float32. Raises BadFileError if K differs."""
    outputs = at_least_float32(outputs)
    count = targets.shape[1:].numel()
    if outputs.shape not in ((len(targets), count), targets.shape):
        raise BadFileError(
            f"model.name: the model's outputs have shape {tuple(outputs.shape)}, and the targets "
            f"{tuple(targets.shape)}; write model.args: {{num_classes: {count}}}, or a model with "
            f"{count} output{'s' * (count > 1)}"
        )
    return outputs.reshape(-1, count), targets.reshape(-1, count).to(outputs.dtype)
