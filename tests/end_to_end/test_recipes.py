"""Every recipe of examples/ is validated, planned, and trained for two steps with small models and data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.io import write_jpeg

from hpc_train.experiment.validate.loading import load
from tests.cli import commands
from tests.datasets.coco import write_coco
from tests.datasets.sources.masks import write_folder
from tests.end_to_end.runs import REPOSITORY, found_runs, hpc_train, rows, status

EXAMPLES = REPOSITORY / "examples"
#: What makes a recipe small: two steps of eight samples on one CPU rank, in eager mode.
SHORT = (
    "device=cpu",
    "compile=false",
    "optimization.epochs=null",
    "optimization.steps=2",
    "optimization.global_batch_size=8",
    "optimization.micro_batch_size=2",
    "optimization.schedule={name: constant}",
    "evaluation={every_steps: 2}",
    "logging={every_steps: 1}",
    "data.workers=0",
    "slurm=null",
)
#: Makes the recipes of large segmenters and detectors small.
SEGMENTER = ("model={name: torchvision/lraspp_mobilenet_v3_large}", "data.image_size=48", "data.eval_size=64")
DETECTOR = ("model={name: torchvision/ssdlite320_mobilenet_v3_large}", "data.image_size=64")
#: What else is changed, by recipe; each has a line here.
OF_RECIPE: dict[str, tuple[str, ...]] = {
    "bccd-fcos": ("model.args.width=32", "data.image_size=64"),
    "bccd-ssdlite": ("data.image_size=64",),
    "camvid-lraspp": ("data.image_size=48",),
    "camvid-unet": (
        "model={name: smp/unet, args: {encoder_name: tu-test_resnet}}",
        "data.image_size=64",
        "data.normalize=null",
    ),
    "cifar10-94": ("model.args.widths=[8, 8, 8]", "precision=fp32"),
    "cifar10-cpu": ("model.args.widths=[8, 8, 8]",),
    "cifar10-images": (),
    "cifar10-resnet50": ("model.name=timm/test_resnet", "data.image_size=32"),
    "cifar10-vit": ("model.args.depth=2", "model.args.embed_dim=24"),
    "cifar10-vit-finetune": (
        "model={name: timm/test_vit, args: {img_size: 32}}",
        "data.image_size=32",
        "data.normalize=null",
    ),
    "cifar10-vit-lora": (
        "model.name=timm/test_vit",
        "model.pretrained=false",
        "model.args={img_size: 32}",
        "data.image_size=32",
        "data.normalize=null",
    ),
    "cityscapes-deeplabv3-mobilenet": SEGMENTER,
    "cityscapes-deeplabv3-resnet101": SEGMENTER,
    "cityscapes-deeplabv3-resnet50": SEGMENTER,
    "cityscapes-fcn-resnet50": SEGMENTER,
    "cityscapes-lraspp-mobilenet": SEGMENTER,
    "coco-fasterrcnn": DETECTOR,
    "coco-fcos": DETECTOR,
    "coco-retinanet": DETECTOR,
    "digits": (),
    "digits-wandb": ("logging={every_steps: 1, wandb: {project: digits, mode: offline}}",),
    "ema-syncbn-compile": (),
    "fine-tuning": ("model.args.widths=[8, 8, 8]", "model.init_from=null"),
    "fine-tuning-pretrain": ("model.args.widths=[8, 8, 8]",),
    "graph-network": (),
    "imagenet-convnext-tiny": ("model.name=timm/test_convnext", "data.image_size=32"),
    "imagenet-resnet50": ("model.name=torchvision/resnet18", "data.image_size=32"),
    "imagenet-vit-b16": ("model={name: timm/test_vit, args: {img_size: 32}}", "data.image_size=32"),
    "shakespeare": (),
    "slurm-digits": (),
    "vit-small": ("model.args.depth=2", "model.args.embed_dim=24", "model.init_from=null"),
    "vit-small-pretrain": ("model.args.depth=2", "model.args.embed_dim=24"),
}
#: Recipes that differ in name and learning rate alone from another one, once they are small.
SAME_AS = {
    "cityscapes-deeplabv3-mobilenet": "cityscapes-lraspp-mobilenet",
    "cityscapes-deeplabv3-resnet101": "cityscapes-lraspp-mobilenet",
    "cityscapes-fcn-resnet50": "cityscapes-lraspp-mobilenet",
    "coco-fcos": "coco-fasterrcnn",
}
#: Recipes with the task, the model and the source of data of another one, once they are small: trained in
#: ``make test-full`` only.
ALIKE = {
    "cifar10-cpu": "cifar10-94",
    "cifar10-images": "imagenet-resnet50",
    "cifar10-vit": "vit-small",
    "cifar10-vit-finetune": "imagenet-vit-b16",
    "cityscapes-deeplabv3-resnet50": "cityscapes-lraspp-mobilenet",
    "coco-retinanet": "coco-fasterrcnn",
    "digits": "digits-wandb",
    "fine-tuning-pretrain": "cifar10-94",
    "slurm-digits": "digits-wandb",
    "vit-small-pretrain": "vit-small",
}
_TRAINS_ALL = os.environ.get("HPC_TRAIN_ALL_PARALLEL") == "1"
RECIPES = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
#: Run by tests/end_to_end/test_language_model_recipes.py.
LANGUAGE_MODELS = {"gpt2-124m", "llama-fsdp-tensor"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of data that has what the recipes read, in small."""
    folder = tmp_path_factory.mktemp("data")
    generator = torch.Generator().manual_seed(0)
    for split in ("train", "val", "test"):
        for number in range(20):
            image = folder / "images" / split / f"class{number % 10}" / f"{number}.jpg"
            image.parent.mkdir(parents=True, exist_ok=True)
            pixels = torch.randint(256, (3, 32, 32), dtype=torch.uint8, generator=generator)
            write_jpeg(pixels, str(image))
    for name, classes, ignored in (("camvid", 11, 11), ("cityscapes", 19, 255)):
        write_folder(folder / name, num_classes=classes, sides=(64, 64), ignored=ignored, train=8, val=2)
    write_coco(folder / "coco", train=8, val=2, side=64)
    (folder / "text.txt").write_text("To be, or not to be, that is the question. " * 500)
    return folder


def roots(recipe: str, data: Path) -> tuple[str, ...]:
    """Return the overrides that let the recipe read ``data``."""
    text = (EXAMPLES / f"{recipe}.yaml").read_text()
    found = {
        "name: imagefolder": "images",
        "name: text": "text.txt",
        "name: coco ": "coco",
        "name: coco\n": "coco",
        "root: data/camvid": "camvid",
        "root: data/cityscapes": "cityscapes",
    }
    return tuple(f"data.root={data / path}" for name, path in found.items() if name in text)


def small(recipe: str, data: Path) -> tuple[str, ...]:
    """Return the overrides that make the recipe small."""
    return (*SHORT, *OF_RECIPE[recipe], *roots(recipe, data))


def settings(recipe: str, data: Path) -> dict[str, Any]:
    """Return the settings of the small recipe without its name and learning rate."""
    found = load(EXAMPLES / f"{recipe}.yaml", small(recipe, data)).experiment.model_dump()
    del found["name"], found["optimization"]["optimizer"]["lr"]
    return found


def parts(recipe: str, data: Path) -> tuple[str, str, str]:
    found = settings(recipe, data)
    return found["task"], found["model"]["name"], found["data"]["name"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted({*RECIPES} - LANGUAGE_MODELS))
def test_a_recipe_is_planned_and_trains(
    recipe: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example, runs = EXAMPLES / f"{recipe}.yaml", {"HPC_TRAIN_RUNS": str(tmp_path / "runs")}
    monkeypatch.chdir(tmp_path)
    planned = commands.hpc_train("plan", example)
    assert planned.code == 0, planned.err
    if recipe in SAME_AS:
        assert settings(recipe, data) == settings(SAME_AS[recipe], data)
        return
    if recipe in ALIKE and not _TRAINS_ALL:
        assert parts(recipe, data) == parts(ALIKE[recipe], data)
        return
    done = hpc_train("submit", example, *small(recipe, data), "--local", "--devices", "1", **runs)
    assert done.code == 0, done.err
    (paths,) = found_runs(tmp_path)
    assert status(paths)["state"] == "completed"
    assert [row["step"] for row in rows(paths, "train")] == [1, 2]
    assert rows(paths, "val")


def test_the_table_lists_every_recipe() -> None:
    table = (EXAMPLES / "README.md").read_text()
    assert [recipe for recipe in RECIPES if f"[{recipe}]({recipe}.yaml)" not in table] == []
