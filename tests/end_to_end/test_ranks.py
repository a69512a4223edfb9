"""The same file means the same training on 1, 2, 3 and 4 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.runs import final_tensors, rows, submit

pytestmark = pytest.mark.slow

SGD = (
    "optimization.optimizer={name: sgd, lr: 0.05, momentum: 0.9}",
    "optimization.schedule={name: constant}",
    "optimization.steps=12",
    "evaluation.every_steps=6",
    "model.args={norm: false}",
)


def assert_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(
                other[name], value, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


def losses(found: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([row["loss"] for row in found], dtype=torch.float64)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_losses_and_weights_are_the_same_on_any_number_of_ranks(strategy: str, tmp_path: Path) -> None:
    override = f"parallel.strategy={strategy}"
    one = submit(tmp_path / "1", *SGD, override, devices=1)
    for devices in (2, 3, 4):
        other = submit(tmp_path / str(devices), *SGD, override, devices=devices)
        torch.testing.assert_close(losses(rows(other)), losses(rows(one)), rtol=0, atol=1e-5)
        assert_alike(final_tensors(one), final_tensors(other))


def test_evaluation_of_the_same_weights_is_bitwise_identical(tmp_path: Path) -> None:
    """A rate too small to change a weight: what differs could only come from how ranks share the data."""
    frozen = (*SGD, "optimization.optimizer={name: sgd, lr: 1.0e-30}", "optimization.steps=1")
    found = [
        rows(submit(tmp_path / str(devices), *frozen, devices=devices), "val") for devices in (1, 2, 3, 4)
    ]
    assert found[0][0]["accuracy"] > 0
    assert all(each == found[0] for each in found)


def test_accumulation_changes_nothing(tmp_path: Path) -> None:
    """One micro-batch of all 48 samples, and four of 12 one after the other."""
    plain = (*SGD, "model.args={norm: false, dropout: 0}")
    whole = submit(tmp_path / "whole", *plain, "optimization.micro_batch_size=48", devices=1)
    parts = submit(tmp_path / "parts", *plain, devices=1)
    torch.testing.assert_close(losses(rows(parts, "train")), losses(rows(whole, "train")), rtol=0, atol=1e-5)
    assert_alike(final_tensors(whole), final_tensors(parts))
