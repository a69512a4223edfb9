"""A case trained on ranks beside plain PyTorch: how far they are apart, and how far they may be.

float64: 1e-9 for weights, gradients of the last step and EMA. What is left is the order of additions.

fp32 and tf32 (the same on CPU): 1e-5 for losses, and for weights under SGD. Under AdamW a weight whose true
gradient is zero, like a key's bias, moves by the sign of rounding errors, so that only losses are compared.

bf16 and fp16: losses, beside plain PyTorch in float32. A rounding is up to 2^-9 of a number in bf16 (2^-12 in
fp16). The deepest model here rounds about 30 times between image and logits, and errors add up like a random
walk: √30 · 2^-9 ≈ 0.011 of logits that are about 2 in size, half of that in the mean loss of four samples.
Twenty steps on slightly wrong gradients, and BatchNorm over one micro-batch, add as much again: 0.015 is
allowed in bf16, an eighth of it (as the roundings are) in fp16. A micro-batch with a wrong weight gives more,
and so do gradients twice as large (test_what_is_wrong_is_seen).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.parallelism import plain, training
from tests.parallelism.cases import Case
from tests.parallelism.groups import LIMIT_S, Groups
from tests.parallelism.plain import Reference
from tests.parallelism.training import Trained

#: Precision → most that losses may differ.
LOSS_TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5, "tf32": 1e-5, "bf16": 0.015, "fp16": 0.015 / 8}
#: Precision → most that weights may differ.
WEIGHT_TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5, "tf32": 1e-5}


@dataclass(frozen=True)
class Deviation:
    """The largest absolute difference of each kind; None where the case claims nothing of it."""

    losses: float
    weights: float | None
    gradients: float | None
    #: BatchNorm's running statistics; None for a model without.
    buffers: float | None
    losses_limit: float
    limit: float | None

    @property
    def is_within(self) -> bool:
        found = [value for value in (self.weights, self.gradients, self.buffers) if value is not None]
        # Not `>`: a NaN is within nothing.
        return self.losses <= self.losses_limit and all(value <= (self.limit or 0) for value in found)


class Comparison:
    """Trains cases and their references; a reference that serves several cases is trained once."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.groups = Groups(limit_s)
        self._references: dict[str, Trained] = {}

    def close(self) -> None:
        self.groups.close()

    def deviation(self, case: Case) -> Deviation:
        """Train ``case`` on its ranks and compare. Raises RankError, or AssertionError where ranks differ."""
        ranks: list[Trained] = self.groups.run(case.shape.ranks, training.train, case)
        # Those that share a model hold the same losses.
        losses = torch.stack([rank.losses for rank in ranks]).sum(dim=0)
        return _deviation(case, losses, ranks[0], self._reference(case, ranks[0].skipped))

    def _reference(self, case: Case, skipped: tuple[int, ...]) -> Trained:
        config = case.experiment
        dtype = torch.float64 if config.precision == "fp64" else torch.float32
        reference = Reference(config, dtype, case.shape.micro_batches, case.data_ranks, skipped)
        key = repr((_mathematics(reference), dtype, reference.micro_batches, reference.data_ranks, skipped))
        if key not in self._references:
            (self._references[key],) = self.groups.run(1, plain.train, reference)
        return self._references[key]


def _mathematics(reference: Reference) -> object:
    config = reference.experiment
    return config.model, config.optimization, config.parallel.sync_batchnorm


def _deviation(case: Case, losses: Tensor, found: Trained, expected: Trained) -> Deviation:
    config = case.experiment
    assert len(found.skipped) < 5, f"the scaler left steps {found.skipped} out"
    is_compared = config.precision == "fp64" or (
        config.precision in WEIGHT_TOLERANCE and config.optimization.optimizer.name == "sgd"
    )
    weights = gradients = buffers = None
    if is_compared:
        pairs = (
            (_without_statistics(found.weights), _without_statistics(expected.weights)),
            (found.average, expected.average),
        )
        weights = max(_largest(ours, theirs) for ours, theirs in pairs)
        gradients = _largest(found.gradients, expected.gradients)
        statistics = _statistics(expected.weights)
        buffers = _largest(_statistics(found.weights), statistics) if statistics else None
    limit = WEIGHT_TOLERANCE[config.precision] if is_compared else None
    return Deviation(
        _apart(losses, expected.losses), weights, gradients, buffers, LOSS_TOLERANCE[config.precision], limit
    )


def _statistics(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return BatchNorm's running statistics."""
    kinds = ("running_mean", "running_var", "num_batches_tracked")
    return {name: value for name, value in tensors.items() if name.endswith(kinds)}


def _without_statistics(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    statistics = _statistics(tensors)
    return {name: value for name, value in tensors.items() if name not in statistics}


def _largest(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max((_apart(found[name], value) for name, value in expected.items()), default=0.0)


def _apart(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    # amax keeps NaN.
    return float((one.double() - other.double()).abs().amax()) if one.numel() else 0.0
