"""Segmentation of a folder by the real command: as plain PyTorch trains, and bitwise after a kill."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from hpc_train.training.datasets.random_numbers import Keys, seed_build
from hpc_train.training.datasets.sampler import MicroBatchSampler, Position
from tests.datasets.sources.masks import IGNORED, write_folder
from tests.end_to_end.parts import segmenter
from tests.end_to_end.runs import (
    final_tensors,
    rows,
    submit,
)

pytestmark = pytest.mark.slow

STEPS = 20
SEED = 3
CLASSES = 3
EXPERIMENT = f"""\
name: scenes
seed: {SEED}
task: segmentation
model: {{name: "tests.end_to_end.parts:segmenter"}}
data:
  name: segmentation_folder
  root: ROOT
  args: {{num_classes: {CLASSES}, class_names: [road, car, sky]}}
  augment: {{hflip: 0.5}}
optimization:
  steps: {STEPS}
  global_batch_size: 6
  micro_batch_size: 2
  optimizer: {{name: adamw, lr: 0.02}}
precision: fp64
evaluation: {{every_steps: 10}}
checkpoint: {{every_steps: 3}}
logging: {{every_steps: 1}}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("scenes"), num_classes=CLASSES, train=14, val=5)


def plain_training(root: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Train with PyTorch and Pillow alone, on the samples and with the flips that the run had."""
    seed_build(SEED)
    model = segmenter(CLASSES).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = [0.0] * STEPS
    for slot in MicroBatchSampler(
        14,
        global_batch_size=6,
        micro_batch_size=2,
        seed=SEED,
        position=Position(0),
        total_steps=STEPS,
    ):
        flips = Keys(SEED, slot.epoch, slot.indices).flags("hflip", 0.5).tolist()
        samples = [read(root, *each) for each in zip(slot.indices.tolist(), flips, strict=True)]
        images, masks = (torch.stack(parts) for parts in zip(*samples, strict=True))
        losses[slot.step] += plain_step(model, images, masks)
        if slot.number == 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses, dict(model.named_parameters())


def read(root: Path, index: int, is_flipped: bool) -> tuple[Tensor, Tensor]:
    image, mask = (
        np.array(Image.open(root / "train" / kind / f"{index:03d}.png")) for kind in ("images", "masks")
    )
    if is_flipped:
        image, mask = image[:, ::-1].copy(), mask[:, ::-1].copy()
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], dtype=torch.float64)
    pixels = torch.from_numpy(image).double() / 255
    return ((pixels - mean) / std).permute(2, 0, 1), torch.from_numpy(mask).long()


def plain_step(model: nn.Module, images: Tensor, masks: Tensor) -> float:
    logits = model(images)
    out = functional.interpolate(logits["out"], size=masks.shape[1:], mode="bilinear", align_corners=False)
    loss = functional.cross_entropy(out, masks, ignore_index=IGNORED)
    loss = loss + 0.4 * functional.cross_entropy(logits["aux"], masks, ignore_index=IGNORED)
    (loss / 3).backward()  # type: ignore[no-untyped-call]
    return loss.item() / 3


def test_twenty_steps_equal_plain_pytorch_on_one_and_two_ranks(root: Path, tmp_path: Path) -> None:
    losses, weights = plain_training(root)
    for devices in (1, 2):
        run = submit(tmp_path / str(devices), devices=devices, text=EXPERIMENT.replace("ROOT", str(root)))
        logged = [row["loss"] for row in rows(run, "train")]
        assert logged == pytest.approx(losses, abs=1e-9)
        final = final_tensors(run)
        for name, value in weights.items():
            torch.testing.assert_close(final[f"model.{name}"], value.detach(), rtol=0, atol=1e-9)
        (first, last) = rows(run, "val")
        assert last["miou"] > first["miou"] > 0 and 0 < last["iou_car"] < 1
        assert (run.evaluation(STEPS) / "confusion.csv").read_text().startswith("class,road,car,sky\n")
        assert run.evaluation_images(STEPS).keys() == {"predictions"}
