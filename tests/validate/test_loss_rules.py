"""A loss that the task does not have is an error at the file that lists the names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.files import GOOD, problems_of
from tests.validate.test_data_rules import TEXT


@pytest.mark.parametrize(
    ("text", "override", "key", "said"),
    [
        (GOOD, "optimization.loss=mse", "loss.name", "write one of cross_entropy, bce, focal"),
        (GOOD, "optimization.loss=crossentropy", "loss.name", "did you mean cross_entropy?"),
        (
            TEXT,
            "optimization.loss=focal",
            "loss.name",
            "causal_lm has no loss 'focal' (it has cross_entropy)",
        ),
        (
            GOOD,
            "optimization.loss={name: focal, args: {gama: 2.0}}",
            "loss.args.gama",
            "did you mean 'gamma'",
        ),
        (
            GOOD,
            "optimization.loss={name: focal, args: {gamma: -1.0}}",
            "loss.args.gamma",
            "needs a number of at least 0, got -1.0",
        ),
        (
            GOOD,
            "optimization.loss={name: bce, args: {pos_weight: [1.0, many]}}",
            "loss.args.pos_weight[1]",
            "needs a number of at least 0, got the text 'many'",
        ),
    ],
)
def test_a_loss_that_the_task_does_not_have_is_refused(
    text: str, override: str, key: str, said: str, tmp_path: Path
) -> None:
    (line,) = problems_of(tmp_path, text, override)
    assert f": optimization.{key}: " in line and said in line


@pytest.mark.parametrize(
    ("text", "overrides", "key", "said"),
    [
        (TEXT, ("optimization.mixup=0.2",), "mixup", "causal_lm can't; take it out"),
        (
            GOOD,
            ("optimization.mixup=0.2", "optimization.micro_batch_size=1"),
            "mixup",
            "which has one; write",
        ),
        (GOOD, ("optimization.cutmix=1", "optimization.micro_batch_size=auto"), "cutmix", "auto would make"),
    ],
)
def test_what_can_not_be_mixed_is_refused(
    text: str, overrides: tuple[str, ...], key: str, said: str, tmp_path: Path
) -> None:
    (line,) = problems_of(tmp_path, text, *overrides)
    assert f": optimization.{key}: " in line and said in line


@pytest.mark.parametrize(
    "override",
    [
        "optimization.loss=bce",
        "optimization.mixup=0.8",
        "optimization.cutmix=1.0",
        "optimization.loss={name: focal, args: {gamma: 1, class_weights: [1]}}",
    ],
)
def test_losses_of_the_task_pass(override: str, tmp_path: Path) -> None:
    assert problems_of(tmp_path, GOOD, override) == []


@pytest.mark.parametrize(
    ("loss", "problems"),
    [
        ("dice", 1),
        ("{name: dice, args: {cross_entropy: 0.0}}", 1),
        ("{name: dice, args: {cross_entropy: 0.5}}", 0),
        ("ohem", 0),
        ("cross_entropy", 0),
    ],
)
def test_smoothing_that_has_no_effect_is_refused(loss: str, problems: int, tmp_path: Path) -> None:
    masks = "data={name: segmentation_folder, root: x, args: {num_classes: 3}, image_size: 64}"
    given = ("task=segmentation", masks, f"optimization.loss={loss}", "optimization.label_smoothing=0.1")
    lines = problems_of(tmp_path, GOOD, "model.name=smp/unet", *given)
    assert len(lines) == problems
    assert all(": optimization.label_smoothing: has no effect on dice" in line for line in lines)
