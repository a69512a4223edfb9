"""Text, and what goes with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.files import problems_of

TEXT = """\
name: letters
task: causal_lm
model: {name: gpt}
data: {name: text, root: some.txt}
optimization:
  steps: 3
  global_batch_size: 64
  micro_batch_size: 16
  optimizer: {name: sgd, lr: 0.1}
"""
ON_DIGITS = "data={name: digits}"


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (("task=classification",), "task", "write causal_lm"),
        (
            (ON_DIGITS, "model.name=acme:net"),
            "task",
            "digits has images (target: class); write classification, or data.name",
        ),
        (("model.name=timm/resnet50",), "model.name", "write gpt"),
        (("model.name=torchvision/resnet18",), "model.name", "write gpt"),
        (("task=classification", ON_DIGITS), "model.name", "write data.name: text, or another model"),
        (("model.name=gpt/2",), "model.name", "write gpt"),
        (("data.name=text/x",), "data.name", "write text"),
        (("data.root=",), "data.root", "text needs it"),
        (("data.augment={hflip: 0.5}",), "data.augment", "does not apply to text; take it out"),
        (("data.transform=my_transforms:train",), "data.transform", "does not apply to text; take it out"),
        (("data.image_size=32",), "data.image_size", "does not apply to text"),
        (("data.eval_crop=0.875",), "data.eval_crop", "does not apply to text"),
        (("data.normalize={mean: [0.5], std: [0.5]}",), "data.normalize", "does not apply to text"),
        (("model.channels_last=true",), "model.channels_last", "does not apply to text"),
        (("model.name=gtp",), "model.name", "write timm/gtp or another of gpt"),
        (("task=causallm",), "task", "did you mean causal_lm?"),
    ],
)
def test_what_does_not_go_with_text_is_refused(
    overrides: tuple[str, ...], key: str, said: str, tmp_path: Path
) -> None:
    lines = problems_of(tmp_path, TEXT, *overrides)
    assert len(lines) == 1, lines
    assert f": {key}: " in lines[0] and said in lines[0]


def test_only_image_folders_have_a_pack(tmp_path: Path) -> None:
    images = TEXT.replace("name: text, root: some.txt", "name: imagefolder, root: images, cache: exp.yaml")
    images = images.replace("causal_lm", "classification").replace("name: gpt", "name: acme.models:net")
    (line,) = problems_of(tmp_path, TEXT, "data.cache=packs")
    assert "data.cache: packs image folders, and text is not one; take it out, or write" in line
    (line,) = problems_of(tmp_path, images, 'data.cache=""')
    assert "data.cache: is empty; write a path" in line
    (tmp_path / "file").touch()
    (line,) = problems_of(tmp_path, images, f"data.cache={tmp_path / 'file'}")
    assert "data.cache: " in line and "is a file; write a folder; prepare creates it" in line
    assert problems_of(tmp_path, images, "data.cache=packs", "data.stage=true") == []
    (line,) = problems_of(tmp_path, images, "data.cache=", "data.stage=/scratch")
    assert "data.stage: copies the packed file of data.cache, and there is none; write data.cache too" in line
    (line,) = problems_of(tmp_path, images, "data.cache=packs", 'data.stage=""')
    assert "data.stage: is empty" in line
    lists = images.replace("imagefolder", "image_list").replace("cache: exp.yaml", "cache: indexes")
    assert problems_of(tmp_path, lists) == []
    assert problems_of(tmp_path, images, "data.cache=packs", "data.cache_pixels=true") == []
    (line,) = problems_of(tmp_path, images, "data.cache=", "data.cache_pixels=true")
    assert "data.cache_pixels: says what the packed file of data.cache contains, and there is none" in line
    assert line.endswith("write data.cache too, or take it out")
    (line,) = problems_of(tmp_path, lists, "data.cache_pixels=true")
    assert "and there is none; take it out" in line
    (line,) = problems_of(tmp_path, lists, "data.stage=true")
    assert "data.stage: copies a packed image folder, and image_list is not one; take it out" in line
    boxes = lists.replace("image_list", "coco").replace("classification", "detection")
    assert problems_of(tmp_path, boxes) == []
    (line,) = problems_of(tmp_path, boxes, "data.stage=true")
    assert "data.stage: copies a packed image folder, and coco is not one; take it out" in line


def test_the_place_is_that_of_the_key(tmp_path: Path) -> None:
    text = TEXT.replace("some.txt}", "some.txt, image_size: 8}")
    (line,) = problems_of(tmp_path, text)
    assert line.startswith("exp.yaml:4:36: data.image_size: does not apply to text")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("data.args={sequence_length: 8, tokens: bytes}",),
        ("model.name=acme:net",),
        ("data.name=acme:data",),
        ("task=classification", "data.name=acme:data", "model.name=acme:net"),
        ("parallel.strategy=fsdp", "precision=bf16", "compile=true"),
    ],
)
def test_sound_files_pass(overrides: tuple[str, ...], tmp_path: Path) -> None:
    assert problems_of(tmp_path, TEXT, *overrides) == []


DETECTION = """\
name: boxes
task: detection
model: {name: torchvision/fasterrcnn_resnet50_fpn_v2}
data: {name: coco, root: coco}
optimization:
  steps: 3
  global_batch_size: 64
  micro_batch_size: 16
  optimizer: {name: sgd, lr: 0.1}
"""


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (("model.name=torchvision/resnet50",), "model.name", "returns no boxes, and detection needs"),
        (("model.name=timm/resnet50",), "model.name", "write a detector, like torchvision/fasterrcnn"),
        (("task=classification", ON_DIGITS), "task", "can't use torchvision/fasterrcnn_resnet50_fpn_v2"),
        (("task=classification", "model.name=acme:net"), "task", "images (target: boxes); write detection"),
        ((ON_DIGITS,), "task", "detection reads images (target: boxes), and digits has"),
        (("parallel.strategy=pipeline",), "parallel.strategy", "splits the model, and detection needs it"),
        (("parallel.strategy=tensor",), "parallel.strategy", "needs it whole; write ddp, or fsdp"),
        (
            ("parallel.strategy=fsdp", "precision=bf16", "model.name=acme:net"),
            "precision",
            "bf16 under fsdp rounds the boxes that the model of detection takes; write fp32",
        ),
        (("data.root=",), "data.root", "write the folder that contains train.json"),
    ],
)
def test_what_does_not_go_with_boxes_is_refused(
    overrides: tuple[str, ...], key: str, said: str, tmp_path: Path
) -> None:
    lines = problems_of(tmp_path, DETECTION, *overrides)
    assert len(lines) == 1, lines
    assert f": {key}: " in lines[0] and said in lines[0]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "hsdp"])
def test_boxes_go_with_every_strategy_whose_ranks_run_the_whole_model(strategy: str, tmp_path: Path) -> None:
    assert problems_of(tmp_path, DETECTION, f"parallel.strategy={strategy}") == []
