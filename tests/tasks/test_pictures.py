"""What is drawn of predictions, pixel by pixel."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from hpc_train.experiment.config.schema import Experiment
from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.tasks import drawing
from hpc_train.training.tasks.base import make_task
from hpc_train.training.tasks.classification import Classification
from hpc_train.training.tasks.detection import Detection
from hpc_train.training.tasks.drawing import Box, color_of
from tests.tasks import test_classification, test_segmentation
from tests.tasks.test_classification import experiment

IMAGE = Image.new("RGB", (128, 128), (200, 100, 50))
NAMES = ("cat", "dog", "eel", "fox", "gnu", "hen")


def pixels(image: Image.Image) -> np.ndarray[Any, Any]:
    return np.asarray(image)


def colors(image: Image.Image) -> set[tuple[int, ...]]:
    return set(map(tuple, pixels(image).reshape(-1, 3).tolist()))


def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which all text that is drawn from now on is added."""
    found: list[str] = []
    draw = drawing.ImageDraw.ImageDraw.text

    def noted(self: Any, place: Any, text: str, *arguments: Any, **keys: Any) -> None:
        found.append(text)
        draw(self, place, text, *arguments, **keys)

    monkeypatch.setattr(drawing.ImageDraw.ImageDraw, "text", noted)
    return found


def test_colors_of_classes_differ() -> None:
    assert len({color_of(number) for number in range(60)}) == 60


@pytest.mark.parametrize(
    ("size", "shown"),
    [((32, 20), (128, 80)), ((200, 150), (200, 150)), ((2048, 1024), (384, 192)), ((1, 9000), (1, 384))],
)
def test_images_are_shown_in_a_size_that_can_be_seen(size: tuple[int, int], shown: tuple[int, int]) -> None:
    assert drawing.fitted(Image.new("RGB", size)).size == shown


def test_names_are_one_short_line() -> None:
    assert drawing.short("a\nb\x1b[31m c") == "a b\\x1b[31m c"
    assert drawing.short("x" * 25) == "x" * 23 + "…"
    assert drawing.short(7) == "7"


def test_classes_are_colors_over_gray_and_ignored_pixels_are_dark() -> None:
    classes = np.array([[0, 1, 255]])
    image = Image.new("RGB", (3, 1), (100, 100, 100))
    found = pixels(drawing.with_classes(image, classes, classes == 255))[0].tolist()
    mixed = [[round(0.4 * 100 + 0.6 * part) for part in color_of(number)] for number in (0, 1)]
    assert found == [*mixed, [35, 35, 35]]


def test_a_segmentation_shows_image_mask_and_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    written = texts(monkeypatch)
    masks = torch.tensor([[[0, 1], [2, test_segmentation.IGNORED]]], dtype=torch.uint8).repeat(2, 1, 1)
    predicted = torch.tensor([[[1, 1], [1, 1]], [[0, 0], [2, 3]]])
    logits = functional.one_hot(predicted, 4).permute(0, 3, 1, 2).float()
    task = test_segmentation.task(class_names=("Sky", "car", "road", "sign"))
    image = Image.new("RGB", (2, 2), (100, 100, 100))
    found = pixels(task.picture({"out": logits}, test_segmentation.batch(masks), 1, image))
    assert written == ["image", "ground truth", "prediction", "sky", "car", "road"], (
        "no class is named that is not there"
    )

    def shown(panel: int) -> list[list[int]]:
        """Return the middles of the four squares of a panel of 128 × 128."""
        left, top = panel * 132, 17
        return [found[top + y, left + x].tolist() for y in (32, 96) for x in (32, 96)]

    def mixed(number: int) -> list[int]:
        return [round(40 + 0.6 * part) for part in color_of(number)]

    assert shown(0) == [[100] * 3] * 4
    assert shown(1) == [mixed(0), mixed(1), mixed(2), [35] * 3]
    assert shown(2) == [mixed(0), mixed(0), mixed(2), [35] * 3], "where nothing is labelled, nothing counts"


def test_logits_of_another_size_are_resized_to_the_mask() -> None:
    logits, masks = test_segmentation.outputs()
    small = functional.interpolate(logits, size=(3, 2))
    image = Image.new("RGB", (5, 6))
    found = test_segmentation.task().picture(small, test_segmentation.batch(masks), 0, image)
    assert found.mode == "RGB" and found.width == 3 * 110 + 8


def test_a_box_is_solid_or_dashed() -> None:
    solid = pixels(drawing.with_boxes(IMAGE, [Box((10, 20, 60, 50), "", (1, 2, 3))]))
    assert solid[20, 10:61].tolist() == solid[50, 10:61].tolist() == [[1, 2, 3]] * 51
    assert solid[20:51, 10].tolist() == solid[20:51, 60].tolist() == [[1, 2, 3]] * 31
    assert solid[30, 30].tolist() == solid[19, 30].tolist() == [200, 100, 50]
    dashed = pixels(drawing.with_boxes(IMAGE, [Box((10, 20, 60, 50), "", (1, 2, 3), is_dashed=True)]))
    assert set(map(tuple, dashed[20, 10:61].tolist())) == {(1, 2, 3), drawing.INK}


def test_boxes_are_scaled_with_the_image() -> None:
    wide = Image.new("RGB", (768, 384))
    found = pixels(drawing.with_boxes(wide, [Box((100, 200, 600, 300), "", (9, 9, 9))]))
    rows, columns = (found == 9).all(axis=2).nonzero()
    assert found.shape == (192, 384, 3)
    assert (columns.min(), rows.min(), columns.max(), rows.max()) == (50, 100, 300, 150)


@pytest.mark.parametrize(
    "corners",
    [(-1e9, -5.0, 1e9, 500.0), (90, 90, 10, 10), (300, 300, 400, 400), (0, 0, math.inf, 1), (math.nan,) * 4],
)
def test_boxes_of_a_diverged_model_can_be_drawn(corners: tuple[float, ...]) -> None:
    found = drawing.with_boxes(IMAGE, [Box(corners, "name", (1, 2, 3))])
    assert found.size == IMAGE.size
    assert ((1, 2, 3) in colors(found)) == all(map(math.isfinite, corners))


def test_labels_are_readable_and_within_the_image() -> None:
    inks: list[int] = []
    for corners in ((0, 0, 9, 9), (60, 60, 70, 70), (120, 120, 127, 127)):
        found = drawing.with_boxes(IMAGE, [Box(corners, "platelet 0.97", color_of(2))])
        inks.append(int((pixels(found)[:, :, 0] < 120).sum()))
        assert drawing.WHITE not in colors(found), "dark on yellow"
    assert inks[0] > 0 and len(set(inks)) == 1, "at each place all of the text"


def detection() -> Detection:
    config = experiment().model_dump()
    config |= {"task": "detection", "data": {"name": "coco", "root": "x"}}
    info = DataInfo(2, 3, (0.5,) * 3, (0.5,) * 3, ("cell", "plate"))
    task: Any = make_task(Experiment.model_validate(config), info)
    return task


def found_in_image(*rows: tuple[float, int, tuple[float, ...]]) -> dict[str, Tensor]:
    scores, labels, boxes = zip(*rows, strict=True)
    return {
        "scores": torch.tensor(scores),
        "labels": torch.tensor(labels),
        "boxes": torch.tensor(boxes, dtype=torch.float32),
    }


def test_detections_are_drawn_over_the_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pycocotools")
    written = texts(monkeypatch)
    targets = {
        "boxes": [torch.zeros(0, 4), torch.tensor([[10.0, 30, 50, 70], [80, 80, 120, 120]])],
        "labels": [torch.zeros(0, dtype=torch.int64), torch.tensor([1, 2])],
        "iscrowd": [torch.zeros(0, dtype=torch.int64), torch.tensor([0, 1])],
    }
    valid = torch.ones(2, dtype=torch.bool)
    outputs = [
        found_in_image((0.1, 1, (0, 0, 1, 1))),
        found_in_image((0.9, 1, (12, 30, 50, 70)), (0.5, 2, (60, 30, 70, 40)), (0.29, 1, (1, 1, 9, 9))),
    ]
    found = detection().picture(outputs, Batch(0, 0, 1.0, None, targets, valid), 1, IMAGE)
    assert written == ["cell", "plate", "plate 0.50", "cell 0.90", "ground truth", "prediction"]
    truth, prediction = found.crop((0, 17, 128, 145)), found.crop((132, 17, 260, 145))
    assert {drawing.WHITE, drawing.GRAY, drawing.INK} <= colors(truth)
    assert not {color_of(0), color_of(1)} & colors(truth)
    assert {drawing.WHITE, drawing.GRAY, color_of(0), color_of(1)} <= colors(prediction)
    written.clear()
    described = found.info[drawing.DESCRIPTION]
    assert (described["classes"], described["error"]) == (["cell", "plate"], 0)
    assert described["lines"] == ["2 in the ground truth, 2 detections"]
    nothing = detection().picture(outputs, Batch(0, 0, 1.0, None, targets, valid), 0, IMAGE)
    assert nothing.info[drawing.DESCRIPTION]["error"] == 0
    assert written == ["ground truth", "prediction"], "nothing there, and nothing certain"


def classification(
    num_classes: int = 6, target_shape: tuple[int, ...] = (), loss: str = ""
) -> Classification:
    config = experiment().model_dump()
    if loss:
        config["optimization"]["loss"] = {"name": loss}
    info = DataInfo(num_classes, 3, (0.5,) * 3, (0.5,) * 3, NAMES, target_shape=target_shape)
    return Classification(Experiment.model_validate(config), info)


def test_a_classification_shows_right_and_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    written = texts(monkeypatch)
    logits = torch.tensor([[0.0, 0, 0, 0, 0, 3], [0.0, 4, 0, 0, 0, 0]])
    batch = test_classification.batch(logits, torch.tensor([5, 0]))
    right = classification().picture(logits, batch, 0, IMAGE)
    assert written == ["true: hen", "predicted: hen 0.80"]
    wrong = classification().picture(logits, batch, 1, IMAGE)
    assert written[2:] == ["true: cat", "predicted: dog 0.92 (wrong)"]
    assert right.getpixel((0, 0)) == drawing.RIGHT and wrong.getpixel((0, 0)) == drawing.WRONG
    assert pixels(right)[3:131, 3:131].tolist() == pixels(IMAGE).tolist()


def test_shares_count_by_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    written = texts(monkeypatch)
    logits = torch.tensor([[0.0, 0, 0, 0, 0, 3]])
    batch = test_classification.batch(logits, torch.tensor([[0.4, 0, 0, 0, 0, 0.6]]))
    classification(target_shape=(6,), loss="cross_entropy").picture(logits, batch, 0, IMAGE)
    assert written == ["true: hen", "predicted: hen 0.80"]


def test_several_labels_are_listed_by_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    written = texts(monkeypatch)
    logits = torch.tensor([[1.0, -3, 2, -3, -3, -3], [-3.0] * 6, [5.0, 4, 3, 2, 1, 0.5]])
    targets = torch.tensor([[1, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1], [1] * 6])
    task, batch = classification(target_shape=(6,)), test_classification.batch(logits, targets)
    first = task.picture(logits, batch, 0, IMAGE)
    assert written == ["true: cat", "    eel", "predicted: eel 0.88", "    cat 0.73"]
    assert first.getpixel((0, 0)) == drawing.RIGHT
    task.picture(logits, batch, 1, IMAGE)
    assert written[4:] == ["true: hen", "predicted: none (wrong)"]
    task.picture(logits, batch, 2, IMAGE)
    assert written[10] == "    2 more" and written[-1] == "    2 more"


def test_a_sheet_is_about_square_and_shows_every_picture() -> None:
    shades = [(40 * number, 0, 0) for number in range(5)]
    found = drawing.sheet(
        [(f"sample {number}", Image.new("RGB", (60, 50), shade)) for number, shade in enumerate(shades)]
    )
    assert found.size == (2 * 76, 3 * 83) or found.size == (3 * 76, 2 * 83)
    assert [(pixels(found) == shade).all(axis=2).sum() for shade in shades] == [3000] * 5


def test_a_sheet_describes_its_samples_for_the_report() -> None:
    logits = torch.tensor([[0.0, 0, 0, 0, 0, 3], [0.0, 4, 0, 0, 0, 0]])
    batch = test_classification.batch(logits, torch.tensor([5, 0]))
    right, wrong = (classification().picture(logits, batch, place, IMAGE) for place in range(2))
    masks = torch.tensor([[[0, 1], [1, 1]]])
    scores = functional.one_hot(torch.tensor([[[0, 1], [1, 0]]]), 4).movedim(-1, 1).float()
    street = test_segmentation.task().picture(scores, test_segmentation.batch(masks), 0, IMAGE)
    pictures = [("a", right), ("b", wrong), ("c", street), ("own", Image.new("RGB", (7, 5)))]
    found = drawing.sheet(pictures)
    described = found.info[drawing.DESCRIPTION]
    assert [(facts.get("classes"), facts.get("error")) for facts in described] == [
        (["hen"], 0), (["cat", "dog"], 1), (["0", "1"], 0.25), (None, None),
    ]  # fmt: skip
    assert described[1]["lines"] == ["true: cat", "predicted: dog 0.92 (wrong)"]
    assert described[2]["lines"] == ["25.0% of the pixels wrong"]
    assert described[2]["legend"] == [("0", "#4363d8"), ("1", "#e6194b")]
    assert [title for title, *_ in described[2]["parts"]] == ["image", "ground truth", "prediction"]
    for (title, picture), facts in zip(pictures, described, strict=True):
        assert facts["title"] == title
        _, left, top, width, height = facts["parts"][0]
        shown = pixels(found.crop((left, top, left + width, top + height)))
        inner = 17 if title == "c" else 0
        assert (shown == pixels(picture)[inner : inner + height, :width]).all(), title
