"""Images with masks or boxes per second of CPU time, beside torchvision's reference transforms.

    python -m benchmarks.masks_and_boxes [--camvid FOLDER] [--bccd FOLDER] [--rounds 7] [--quick]

Each arm reads, decodes, scales, crops, flips and normalizes the same images together with their masks or
boxes, and delivers batches of float images (B, C, H, W), in one process with one thread and no loader
processes: an arm's figure is what one core delivers. Normalizing, which belongs to the device in training, is
part of both arms. Two sources:

- CamVid (``--camvid``: ``train/images/*.jpg`` of 240 x 180 and ``train/masks/*.png``): scaled by 0.5 to 2,
  cropped or padded to 240 x 180, flipped. torchvision's arm is the v2 composition of its segmentation
  reference (references/segmentation/presets.py).
- Blood cells (``--bccd``: ``train.json`` and ``train/*.jpg`` of 640 x 480): scaled by 0.5 to 2 of 320 x 240,
  cropped or padded to that, flipped. torchvision's arm is the v2 composition ``lsj`` of its detection
  reference (references/detection/presets.py), which also removes boxes that are no longer in the image.

Both of torchvision's backends are arms: PIL images, the default of its references, and tensors, the faster
one and so the baseline. Rounds are interleaved and ratios taken within a round. Writes
benchmarks/results/masks_and_boxes.json; with ``--quick``, a trial, it only prints.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tvf

from benchmarks.measuring import (
    ROOT,
    cannot_run,
    comparison,
    conditions,
    interleaved,
    parser,
    report,
    rounds_of,
)
from hpc_train.experiment.config.schema import Experiment
from hpc_train.registry import load
from hpc_train.training.datasets.batches import training_batches
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.normalize import Normalize
from hpc_train.training.datasets.sampler import Position

OURS, PIL_BACKEND, TENSOR_BACKEND = "hpc-train", "torchvision, PIL", "torchvision, tensors"
MASKS = "CamVid: JPEG files of 240 x 180 with masks, scale, crop, flip"
BOXES = "BCCD: JPEG files of 640 x 480 with boxes, scale and crop to 320 x 240, flip"
UNIT = "images per second of CPU time"
BATCH = 16
SCALE = (0.5, 2.0)
#: (H, W), to which both sources are cropped or padded.
CAMVID_SIDES, BCCD_SIDES = (180, 240), (240, 320)
#: Of CamVid's eleven classes and the pixels without one.
NUM_CLASSES = UNLABELLED = 11
#: Images of a round: about a second for the slowest arm.
COUNTS = {MASKS: 640, BOXES: 320}
CPU = torch.device("cpu")

Arms = Mapping[str, Callable[[], Iterable[Any]]]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--camvid", type=Path, default=ROOT / "data" / "camvid")
    options.add_argument("--bccd", type=Path, default=ROOT / "data" / "bccd")
    arguments = options.parse_args()
    for option, folder in (("--camvid", arguments.camvid), ("--bccd", arguments.bccd)):
        if not folder.is_dir():
            cannot_run(f"{folder} does not exist; {option} names a folder with its images")
    torch.set_num_threads(1)
    rounds, share = rounds_of(arguments), 4 if arguments.quick else 1
    comparisons = [
        compare(title, arms, COUNTS[title] // share, rounds)
        for title, arms in ((MASKS, mask_arms(arguments.camvid)), (BOXES, box_arms(arguments.bccd)))
    ]
    measured_with = conditions(("torchvision", "pillow", "simplejpeg")) | {"threads": 1, "batch": BATCH}
    report("masks_and_boxes", arguments, measured_with, comparisons)


def compare(title: str, arms: Arms, count: int, rounds: int) -> dict[str, Any]:
    """Measure all arms of a source; return its table."""
    timed = {arm: functools.partial(images_per_cpu_second, make, count) for arm, make in arms.items()}
    for arm in timed.values():  # what is made at the first call
        arm()
    return comparison(title, UNIT, interleaved(timed, rounds), TENSOR_BACKEND)


def images_per_cpu_second(make: Callable[[], Iterable[Any]], count: int) -> float:
    batches = iter(make())
    start = time.process_time()
    seen = sum(len(images) for images, _ in itertools.islice(batches, count // BATCH))
    assert seen == count, f"the arm ended after {seen} of {count} images"
    return count / (time.process_time() - start)


def mask_arms(root: Path) -> Arms:
    """Return the arms that read ``root/train/{images,masks}``."""
    args = {"num_classes": NUM_CLASSES, "ignore_index": UNLABELLED}
    data = {"name": "segmentation_folder", "args": args, "image_size": CAMVID_SIDES}
    return {
        OURS: ours("segmentation", root, data),
        PIL_BACKEND: lambda: _loader(MaskedImages(root / "train", _mask_changes(is_pil=True))),
        TENSOR_BACKEND: lambda: _loader(MaskedImages(root / "train", _mask_changes(is_pil=False))),
    }


def box_arms(root: Path) -> Arms:
    """Return the arms that read ``root/train.json`` and ``root/train``."""
    return {
        OURS: ours("detection", root, {"name": "coco", "image_size": BCCD_SIDES}),
        PIL_BACKEND: lambda: _loader(BoxedImages(root, _box_changes(is_pil=True))),
        TENSOR_BACKEND: lambda: _loader(BoxedImages(root, _box_changes(is_pil=False))),
    }


def ours(task: str, root: Path, data: dict[str, Any]) -> Callable[[], Iterable[Any]]:
    """Return what starts our input: batches as ranks receive them, normalized as on the device."""
    experiment = Experiment.model_validate(
        {
            "name": "input",
            "seed": 0,
            "task": task,
            "model": {"name": "torchvision/resnet18"},
            "data": {"root": str(root), "augment": {"random_scale": SCALE, "hflip": 0.5}, **data},
            "optimization": {
                "steps": 10**6,
                "global_batch_size": BATCH,
                "micro_batch_size": BATCH,
                "optimizer": {"name": "sgd", "lr": 0.1},
            },
        }
    )
    source = build_source(experiment.data)
    make_task: Any = load("tasks", task)
    spec = make_task(experiment, source.info).target_spec
    normalize = Normalize(source.info, experiment.data)

    def batches() -> Iterator[Any]:
        steps = training_batches(source, experiment, Position(0), 10**6, 0, 1, CPU, target_spec=spec)
        for _, micro_batches in steps:
            for batch in micro_batches:
                yield normalize(batch.inputs), batch.targets

    return batches


class MaskedImages(Dataset[Any]):
    """Images with masks as torchvision's VOCSegmentation returns them, transformed."""

    def __init__(self, folder: Path, changes: v2.Transform) -> None:
        self._images = sorted((folder / "images").iterdir())
        self._masks = [folder / "masks" / f"{image.stem}.png" for image in self._images]
        self._changes = changes

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = Image.open(self._images[index]).convert("RGB")
        mask = tv_tensors.Mask(tvf.pil_to_tensor(Image.open(self._masks[index]))[0])
        images, masks = self._changes(image, mask)
        return images, masks


class BoxedImages(Dataset[Any]):
    """Images with boxes as torchvision's CocoDetection returns them for transforms v2, transformed."""

    def __init__(self, root: Path, changes: v2.Transform) -> None:
        document = json.loads((root / "train.json").read_text(encoding="utf-8"))
        boxes: dict[int, list[tuple[list[float], int]]] = {}
        for each in document["annotations"]:
            boxes.setdefault(each["image_id"], []).append((each["bbox"], each["category_id"]))
        self._samples = [
            (root / "train" / image["file_name"], boxes.get(image["id"], [])) for image in document["images"]
        ]
        self._changes = changes

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        path, found = self._samples[index]
        image = Image.open(path).convert("RGB")
        boxes = tv_tensors.BoundingBoxes(
            [box for box, _ in found],
            format=tv_tensors.BoundingBoxFormat.XYWH,
            canvas_size=(image.height, image.width),
        )
        boxes = tvf.convert_bounding_box_format(boxes, new_format=tv_tensors.BoundingBoxFormat.XYXY)
        target = {"boxes": boxes, "labels": torch.tensor([label for _, label in found])}
        images, targets = self._changes(image, target)
        return images, targets


class PadIfSmaller(v2.Transform):
    """Pads at the right and at the bottom, as references/segmentation/v2_extras.py does."""

    def __init__(self, sides: tuple[int, int], fill: dict[Any, int]) -> None:
        super().__init__()
        self._sides = sides
        self._fill = fill

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        sides = tvf.get_size(flat_inputs[0])
        rows, columns = (max(wanted - has, 0) for wanted, has in zip(self._sides, sides, strict=True))
        return {"padding": [0, 0, columns, rows]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        if not any(params["padding"]):
            return inpt
        fill = self._fill.get(type(inpt), self._fill["others"])
        return tvf.pad(inpt, padding=params["padding"], fill=fill)


def _mask_changes(*, is_pil: bool) -> v2.Transform:
    base = CAMVID_SIDES[0]
    low, high = (int(factor * base) for factor in SCALE)
    return v2.Compose(
        [
            *([] if is_pil else [v2.ToImage()]),
            v2.RandomResize(min_size=low, max_size=high),
            v2.RandomHorizontalFlip(0.5),
            PadIfSmaller(CAMVID_SIDES, {tv_tensors.Mask: UNLABELLED, "others": 0}),
            v2.RandomCrop(CAMVID_SIDES),
            *_to_floats(is_pil=is_pil),
            v2.ToPureTensor(),
        ]
    )


def _box_changes(*, is_pil: bool) -> v2.Transform:
    return v2.Compose(
        [
            *([] if is_pil else [v2.ToImage()]),
            v2.ScaleJitter(BCCD_SIDES, SCALE, antialias=True),
            v2.RandomCrop(BCCD_SIDES, pad_if_needed=True),
            v2.RandomHorizontalFlip(0.5),
            *_to_floats(is_pil=is_pil),
            v2.SanitizeBoundingBoxes(),
            v2.ToPureTensor(),
        ]
    )


def _to_floats(*, is_pil: bool) -> list[v2.Transform]:
    image = Tensor if is_pil else tv_tensors.Image
    dtypes = {image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}
    return [
        *([v2.PILToTensor()] if is_pil else []),
        v2.ToDtype(dtypes, scale=True),
        v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]


def _loader(dataset: Dataset[Any]) -> Iterable[Any]:
    loader = DataLoader(dataset, BATCH, shuffle=True, drop_last=True, collate_fn=_collated)
    while True:
        yield from loader


def _collated(samples: list[tuple[Tensor, Any]]) -> tuple[Tensor, Any]:
    """Return images as a tensor, masks as one, and boxes as a list."""
    images, targets = zip(*samples, strict=True)
    return torch.stack(images), torch.stack(targets) if isinstance(targets[0], Tensor) else list(targets)


if __name__ == "__main__":
    main()
