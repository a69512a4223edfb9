"""The files that the cases of tasks are trained on, and how a bare loop reads them."""

from __future__ import annotations

import csv
import io
import json
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.models.building import build_model
from tests.datasets.coco import read as read_coco
from tests.datasets.coco import write_coco
from tests.datasets.sources import stand_in_datasets
from tests.datasets.sources.masks import IGNORED, write_folder
from tests.parallelism.task_cases import CASES, CONFIGURATIONS, TaskCase

#: Four micro-batches of validation, the last of them half full.
TRAIN, VAL = 12, 7
LENGTH = 16
_MEAN = torch.tensor([0.485, 0.456, 0.406], dtype=torch.float64).view(3, 1, 1)
_STD = torch.tensor([0.229, 0.224, 0.225], dtype=torch.float64).view(3, 1, 1)


def write(root: Path) -> Path:
    """Write the data of all cases below ``root``; indexes and shards of tokens as ``prepare`` does."""
    drawn = np.random.default_rng(0)
    images = [drawn.integers(0, 256, (16, 16, 3), dtype=np.uint8) for _ in range(TRAIN + VAL)]
    _write_list(root / "list", images)
    _write_shards(root / "shards", images)
    _write_saved(root / "saved", images)
    write_folder(root / "scenes", num_classes=3, sides=(32, 32), train=TRAIN, val=VAL)
    _ignore_rows(root / "scenes" / "train" / "masks")
    write_coco(root / "coco", train=TRAIN, val=VAL)
    (root / "corpus").mkdir()
    for part, count in (("train", 30), ("val", 14)):
        lines = [json.dumps({"text": text}) for text in _documents(part, count)]
        (root / "corpus" / f"{part}.jsonl").write_text("\n".join(lines))
    _write_detector(root)
    for name, settings in CONFIGURATIONS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(settings))
    for case in CASES:
        if case.data["name"] in ("tokens", "webdataset"):
            build_source(case.experiment(root).data, download=True)
    return root


def _write_list(root: Path, images: list[np.ndarray]) -> None:
    (root / "images").mkdir(parents=True)
    for split, numbers in (("train", range(TRAIN)), ("val", range(TRAIN, TRAIN + VAL))):
        rows = [["path", "target", "a", "b", "c"]]
        for number in numbers:
            Image.fromarray(images[number]).save(root / f"images/{number}.png")
            rows.append([f"images/{number}.png", *map(str, (number % 3, *_labels(number)))])
        with (root / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)


def _write_shards(root: Path, images: list[np.ndarray]) -> None:
    root.mkdir()
    for number, image in enumerate(images):
        shard = f"train-{number % 2}" if number < TRAIN else "val"
        with tarfile.open(root / f"{shard}.tar", "a") as tar:
            content = json.dumps({"number": _number(number)}).encode()
            for extension, member in (("png", _png(image)), ("json", content)):
                info = tarfile.TarInfo(f"{number:03}.{extension}")
                info.size = len(member)
                tar.addfile(info, io.BytesIO(member))


def _write_saved(root: Path, images: list[np.ndarray]) -> None:
    library = stand_in_datasets
    features = library.Features(
        {"image": library.Image(), "class": library.ClassLabel(["ant", "bee", "cat"])}
    )
    splits = {}
    for split, numbers in (("train", range(TRAIN)), ("validation", range(TRAIN, TRAIN + VAL))):
        columns = {
            "image": [{"bytes": _png(images[number]), "path": None} for number in numbers],
            "class": [number % 3 for number in numbers],
        }
        splits[split] = library.Dataset.from_dict(columns, features)
    library.DatasetDict(splits).save_to_disk(str(root))


def _ignore_rows(root: Path) -> None:
    """Leave masks with different numbers of labelled pixels, and every fourth with none."""
    for number, path in enumerate(sorted(root.iterdir())):
        mask = np.array(Image.open(path))
        mask[: (32, 20, 1, 8)[number % 4]] = IGNORED
        Image.fromarray(mask).save(path)


def _write_detector(root: Path) -> None:
    """Write random weights whose BatchNorm has the statistics of the training images."""
    (case,) = (case for case in CASES if case.task == "detection")
    images = torch.stack([image for image, _ in _boxed(case, root / "coco")]).float()
    torch.manual_seed(0)
    model: Any = build_model(ModelConfig(name=str(case.model["name"])), DataInfo(2, 3, (0.5,), (0.5,)))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.backbone(images)
    save_file(dict(model.state_dict()), root / "ssdlite.safetensors")


def _labels(number: int) -> tuple[int, int, int]:
    return number % 2, number // 2 % 2, number // 4 % 2


def _number(number: int) -> float:
    return number / 4


def _png(image: np.ndarray) -> bytes:
    content = io.BytesIO()
    Image.fromarray(image).save(content, "PNG")
    return content.getvalue()


def _documents(part: str, count: int) -> list[str]:
    draw = random.Random(part)
    return ["".join(draw.choices("abcdefghij ", k=15)) for _ in range(count)]


def samples(case: TaskCase, root: Path) -> list[tuple[Tensor, Any]]:
    """Return (input, target) of each training sample in order, read without hpc-train: images normalised
    with ImageNet's mean and deviation in float64.
    """
    folder = root / Path(str(case.data["root"])).name
    read = {
        "image_list": _listed,
        "webdataset": _sharded,
        "huggingface": _saved,
        "segmentation_folder": _masked,
        "coco": _boxed,
        "tokens": _windows,
    }[case.data["name"]]
    return read(case, folder)


def _listed(case: TaskCase, root: Path) -> list[tuple[Tensor, Any]]:
    with (root / "train.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = case.data["args"].get("target_column")
    targets = [
        torch.tensor([float(row[each]) for each in columns]) if columns else int(row["target"])
        for row in rows
    ]
    return [(_pixels(root / row["path"]), target) for row, target in zip(rows, targets, strict=True)]


def _sharded(case: TaskCase, root: Path) -> list[tuple[Tensor, Any]]:
    found = []
    for shard in (0, 1):
        with tarfile.open(root / f"train-{shard}.tar") as tar:
            members = {each.name: tar.extractfile(each).read() for each in tar.getmembers()}  # type: ignore[union-attr]
        for name in sorted(name for name in members if name.endswith(".png")):
            target = json.loads(members[name.replace(".png", ".json")])["number"]
            found.append((_pixels(io.BytesIO(members[name])), target))
    return found


def _saved(case: TaskCase, root: Path) -> list[tuple[Tensor, Any]]:
    rows = stand_in_datasets.load_from_disk(str(root))["train"]
    return [
        (_pixels(io.BytesIO(rows[index]["image"]["bytes"])), rows[index]["class"])
        for index in range(len(rows))
    ]


def _masked(case: TaskCase, root: Path) -> list[tuple[Tensor, Any]]:
    paths = sorted((root / "train" / "images").iterdir())
    masks = [np.array(Image.open(root / "train" / "masks" / path.name)) for path in paths]
    return [(_pixels(path), torch.from_numpy(mask).long()) for path, mask in zip(paths, masks, strict=True)]


def _boxed(case: TaskCase, root: Path) -> list[tuple[Tensor, Any]]:
    document = read_coco(root)
    found = []
    for image in document["images"]:
        own = [each for each in document["annotations"] if each["image_id"] == image["id"]]
        boxes = torch.tensor([each["bbox"] for each in own], dtype=torch.float64).view(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        labels = torch.tensor([{3: 1, 7: 2}[each["category_id"]] for each in own], dtype=torch.int64)
        found.append((_pixels(root / "train" / image["file_name"]), {"boxes": boxes, "labels": labels}))
    return found


def _windows(case: TaskCase, root: Path) -> list[tuple[Tensor, Any]]:
    stream = [token for text in _documents("train", 30) for token in (*text.encode(), 256)]
    places = range(0, len(stream) - LENGTH, LENGTH)
    windows = [torch.tensor(stream[place : place + LENGTH + 1]) for place in places]
    return [(window[:-1], window[1:]) for window in windows]


def _pixels(source: Path | io.BytesIO) -> Tensor:
    pixels = torch.from_numpy(np.array(Image.open(source)))
    return (pixels.permute(2, 0, 1).double() / 255 - _MEAN) / _STD
