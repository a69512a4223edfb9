"""mixup and CutMix are timm's, from numbers that depend on (seed, step, micro-batch) alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from timm.data.mixup import Mixup
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.forward import Mix, Mixing
from hpc_train.training.tasks.class_losses import smoothed
from hpc_train.training.tasks.classification import Classification
from tests.tasks.test_classification import experiment

TASK = Classification(experiment(), DataInfo(7, 3, (0.5,) * 3, (0.5,) * 3))
TARGETS = torch.tensor([0, 3, 6, 3, 1, 2])


def mixing(mixup: float = 0.0, cutmix: float = 0.0, probability: float = 0.5, seed: int = 1) -> Mixing:
    return Mixing(seed, TASK, mixup, cutmix, probability)


def images() -> Tensor:
    return torch.randn(6, 3, 9, 12, generator=torch.Generator().manual_seed(0))


def batch(inputs: Any = None, step: int = 5, number: int = 2, targets: Tensor = TARGETS) -> Batch:
    inputs = images() if inputs is None else inputs
    return Batch(step, number, 0.25, inputs, targets, torch.ones(6, dtype=torch.bool))


class Timm(Mixup):  # type: ignore[misc]
    """timm's, with a share that is given."""

    def __init__(self, mix: Mix) -> None:
        super().__init__(label_smoothing=0.1, num_classes=7)
        self._mix = mix

    def _params_per_batch(self) -> tuple[float, bool]:
        return self._mix.own, self._mix.box is not None


@pytest.mark.parametrize("key", ["mixup", "cutmix"])
def test_inputs_and_targets_are_timms(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(6):
        found = mixing(seed=seed, **{key: 0.7})
        mix = found.draw(5, 2, images())
        monkeypatch.setattr("timm.data.mixup.rand_bbox", lambda *_, box=mix.box, **__: box)
        inputs, targets = Timm(mix)(images(), TARGETS)
        mixed = found.whole(batch())
        torch.testing.assert_close(mixed.inputs, inputs)
        ours = smoothed(mixed.targets, 0.1, has_several=False)
        torch.testing.assert_close(ours, targets.double(), rtol=0, atol=1e-6)


def test_rectangles_have_the_other_images_share_and_are_cut_off_at_the_border() -> None:
    wide = torch.zeros(2, 1, 64, 128)
    mixes = [mixing(cutmix=1.0).draw(step, 0, wide) for step in range(300)]
    boxes = np.array([mix.box for mix in mixes])
    heights, widths = boxes[:, 1] - boxes[:, 0], boxes[:, 3] - boxes[:, 2]
    assert (boxes >= 0).all() and (boxes[:, 1] <= 64).all() and (boxes[:, 3] <= 128).all()
    areas = heights * widths / (64 * 128)
    assert np.allclose([mix.own for mix in mixes], 1 - areas)
    is_inside = (boxes[:, [0, 2]] > 0).all(axis=1) & (boxes[:, 1] < 64) & (boxes[:, 3] < 128)
    assert is_inside.sum() > 30 and (abs(widths - 2 * heights)[is_inside] <= 1).all()


def test_both_ends_of_a_pipeline_mix_alike() -> None:
    for step in range(20):
        found = mixing(0.8, 1.0)
        whole = found.whole(batch(step=step))
        assert torch.equal(found.only_targets(batch(step=step), images()).targets, whole.targets)


def test_the_batch_itself_is_unchanged() -> None:
    for given in (mixing(0.8), mixing(cutmix=1.0)):
        inputs = images()
        given.whole(batch(inputs))
        assert torch.equal(inputs, images())


def test_numbers_depend_on_seed_step_and_micro_batch_alone() -> None:
    def own(seed: int, step: int, number: int) -> float:
        np.random.seed(0)
        return mixing(0.8, seed=seed).draw(step, number, images()).own

    assert own(1, 5, 2) == own(1, 5, 2)
    np.random.seed(7)
    assert mixing(0.8).draw(5, 2, images()).own == own(1, 5, 2)
    assert len({own(1, 5, 2), own(2, 5, 2), own(1, 6, 2), own(1, 5, 3)}) == 4


def test_a_share_of_the_micro_batches_gets_cutmix() -> None:
    draws = [mixing(0.8, 1.0, probability=0.25).draw(step, 0, images()) for step in range(800)]
    assert 150 < sum(draw.box is not None for draw in draws) < 250
    assert all(mixing(0.8, 1.0, probability=0.0).draw(step, 0, images()).box is None for step in range(50))
    owns = np.array([draw.own for draw in draws if draw.box is None])
    assert 0.45 < owns.mean() < 0.55 and 0.25 < owns.std() < 0.35, "Beta(0.8, 0.8) has 0.5 and 0.31"


def test_a_rectangle_may_be_empty_or_all() -> None:
    inputs = images()
    assert torch.equal(Mix(1.0, (4, 4, 2, 9)).inputs(inputs), inputs)
    assert torch.equal(Mix(0.0, (0, 9, 0, 12)).inputs(inputs), inputs.flip(0))


def test_several_classes_are_mixed_too() -> None:
    info = DataInfo(7, 3, (0.5,) * 3, (0.5,) * 3, target_shape=(7,))
    labels = torch.randint(2, (6, 7), generator=torch.Generator().manual_seed(0))
    given = Mixing(1, Classification(experiment(), info), 0.8, 0.0, 0.5)
    own = given.draw(5, 2, images()).own
    expected = labels * own + labels.flip(0) * (1 - own)
    torch.testing.assert_close(given.whole(batch(targets=labels)).targets, expected.double())


@pytest.mark.parametrize(
    ("given", "inputs", "said"),
    [
        (mixing(cutmix=1.0), torch.zeros(6, 4), r"cutmix: mixes images \(B, C, H, W\), .* shape \(6, 4\)"),
        (mixing(0.2), {"image": images()}, "mixup: mixes images or features in one tensor, .* are a dict"),
        (mixing(0.2), torch.zeros(6, 4, dtype=torch.int64), r"mixup: .* shape \(6, 4\); take it out"),
    ],
)
def test_other_inputs_are_refused(given: Mixing, inputs: Any, said: str) -> None:
    with pytest.raises(BadFileError, match=said):
        given.whole(batch(inputs))


def test_a_task_without_soft_targets_is_refused() -> None:
    config = SimpleNamespace(mixup=0.0, cutmix=1.0, cutmix_probability=0.5)
    file = cast(Experiment, SimpleNamespace(seed=0, task="own", optimization=config))
    with pytest.raises(BadFileError, match=r"optimization\.cutmix: task own has no method soft_targets"):
        Mixing.of(file, object())
    config.cutmix = 0.0
    assert Mixing.of(file, object()) is None
