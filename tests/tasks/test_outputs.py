"""Outputs that a task can't use are named with their shape, before a loss of torch's fails on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.tasks.causal_lm import CausalLM
from hpc_train.training.tasks.classification import Classification
from hpc_train.training.tasks.regression import Regression
from hpc_train.training.tasks.segmentation import Segmentation
from tests.tasks.test_classification import experiment

VALUES = (0.5,) * 3


def classification() -> tuple[Any, Tensor]:
    return Classification(experiment(), DataInfo(10, 3, VALUES, VALUES)), torch.zeros(2, dtype=torch.long)


def segmentation() -> tuple[Any, Tensor]:
    task = Segmentation(experiment(), DataInfo(10, 3, VALUES, VALUES, ignore_index=255))
    return task, torch.zeros(2, 4, 4, dtype=torch.uint8)


def causal_lm() -> tuple[Any, Tensor]:
    return CausalLM(experiment(), DataInfo(10, 0, (), (), sequence_length=4)), torch.zeros(2, 4).long()


def regression() -> tuple[Any, Tensor]:
    return Regression(experiment(), DataInfo(1, 3, VALUES, VALUES, target_shape=())), torch.zeros(2)


@pytest.mark.parametrize(
    ("make", "outputs", "said"),
    [
        (classification, torch.zeros(2, 7), r"shape \(2, 7\), and the data 10 classes; write model.args"),
        (classification, torch.zeros(2, 10, 1), r"shape \(2, 10, 1\), .* or a model that returns \(B, C\)$"),
        (classification, (torch.zeros(2, 10), 0), r"returned a tuple; return a tensor alone"),
        (classification, {"logits": torch.zeros(2, 10)}, r"returned a dict; return a tensor alone"),
        (segmentation, torch.zeros(2, 10), r"shape \(2, 10\), .* returns \(B, C, H, W\)$"),
        (segmentation, {"out": torch.zeros(2, 9, 4, 4)}, r"shape \(2, 9, 4, 4\), and the data 10 classes"),
        (segmentation, {"logits": 0}, r"returned a dict"),
        (causal_lm, torch.zeros(2, 10), r"shape \(2, 10\), .* returns \(B, T, C\)$"),
        (causal_lm, None, r"returned a NoneType"),
        (regression, (torch.zeros(2, 1),), r"returned a tuple"),
    ],
)
def test_outputs_that_a_task_can_not_use_are_named(make: Any, outputs: Any, said: str) -> None:
    task, targets = make()
    batch = Batch(0, 0, 1.0, None, targets, torch.ones(2, dtype=torch.bool))
    for use in (task.loss, task.sums):
        with pytest.raises(BadFileError, match=rf"^model\.name: the model('s outputs have)? .*{said}"):
            use(outputs, batch)


def test_more_outputs_than_classes_are_a_models_own_choice() -> None:
    task, targets = classification()
    batch = Batch(0, 0, 1.0, None, targets, torch.ones(2, dtype=torch.bool))
    assert task.loss(torch.zeros(2, 12), batch).item() == pytest.approx(torch.log(torch.tensor(12.0)).item())


def test_one_class_is_nothing_to_classify() -> None:
    info = DataInfo(1, 3, VALUES, VALUES, ("animals",))
    with pytest.raises(BadFileError, match=r"^data\.name: digits has one class, animals, and classification"):
        Classification(experiment(), info)
