# ruff: noqa: N803, N806  (shape suffixes)
"""Multi-label metrics of ``classification``: each class of a sample is a separate binary decision.

Legend: B samples of a batch, N of the validation data, C classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpc_train.datasets.types import Batch

#: The rows of ``outcomes``: (class is present, class is predicted).
_OUTCOMES = ((True, True), (False, True), (True, False), (False, False))


def label_sums(logits_BC: Tensor, targets_BC: Tensor, batch: Batch) -> dict[str, Any]:
    """Return the sums that ``label_metrics`` reads. A class is predicted if its probability is at least ½.

    ``correct``: samples with all classes right; ``outcomes``, (4, C) int64: true positives, false positives,
    false negatives and true negatives of each class; ``scores``: a record (2, C) of each sample.
    """
    is_true, is_predicted, valid = targets_BC > 0.5, logits_BC >= 0, batch.valid
    outcomes = [
        ((is_true == true) & (is_predicted == predicted) & valid[:, None]).sum(0)
        for true, predicted in _OUTCOMES
    ]
    return {
        "correct": ((is_true == is_predicted).all(dim=1) & valid).sum(dtype=torch.float64),
        "outcomes": torch.stack(outcomes),
        "scores": list(torch.stack([logits_BC, is_true.to(logits_BC.dtype)], dim=1)),
    }


def label_metrics(sums: dict[str, Any]) -> dict[str, float]:
    """Return ``f1_micro``, ``f1_macro`` and ``map_multilabel``, without the classes that no sample has.

    Defined as in scikit-learn, with an F1 score of 0 for a class that is neither present nor predicted.
    """
    hits_C, wrong_C, missed_C, _ = sums["outcomes"].double()
    scores_NC, are_true_NC = torch.stack(sums["scores"]).unbind(1)
    precisions = [
        average_precision(scores_N, are_true_N)
        for scores_N, are_true_N in zip(scores_NC.T, are_true_NC.T, strict=True)
        if are_true_N.any()
    ]
    return {
        "f1_micro": _f1(hits_C.sum(), (wrong_C + missed_C).sum()).item(),
        "f1_macro": _f1(hits_C, wrong_C + missed_C).mean().item(),
        "map_multilabel": sum(precisions) / len(precisions) if precisions else 0.0,
    }


def _f1(hits: Tensor, errors: Tensor) -> Tensor:
    return 2 * hits / (2 * hits + errors).clamp(min=1)


def average_precision(scores_N: Tensor, are_true_N: Tensor) -> float:
    """Return Σ (Rₖ - Rₖ₋₁) Pₖ over the thresholds k: all scores that occur, so that ties have no order."""
    sorted_N, order_N = scores_N.sort(descending=True)
    hits_N = are_true_N[order_N].double().cumsum(0)
    is_last_N = torch.ones_like(sorted_N, dtype=torch.bool)
    is_last_N[:-1] = sorted_N[:-1] != sorted_N[1:]
    counts_N = torch.arange(1, len(sorted_N) + 1, dtype=torch.float64)
    hits_K, counts_K = hits_N[is_last_N], counts_N[is_last_N]
    gained_K = hits_K.diff(prepend=hits_K.new_zeros(1))
    return float((gained_K * hits_K / counts_K).sum() / hits_N[-1])
