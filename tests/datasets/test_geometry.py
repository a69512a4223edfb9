from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from hpc_train.experiment.config.training_sections import AugmentConfig
from hpc_train.training.datasets.decoding import EncodedImage, read_image
from hpc_train.training.datasets.images import resize
from hpc_train.training.datasets.joint import Geometry, Rectangle, fitted, fitted_back, random_geometries
from hpc_train.training.datasets.random_numbers import Keys

SIDES = (40, 60)


def geometries(
    config: dict[str, Any],
    count: int = 200,
    canvas: tuple[int, int] | None = (32, 32),
    eval_canvas: tuple[int, int] | None = None,
    sides: tuple[int, int] = SIDES,
) -> list[Geometry]:
    keys = Keys(0, 3, torch.arange(count))
    augment = AugmentConfig.model_validate(config)
    return random_geometries(augment, keys, [sides] * count, canvas, eval_canvas or canvas)


def gradient(height: int = SIDES[0], width: int = SIDES[1]) -> Tensor:
    """Return an image of which each pixel has its row, its column and 1, as floats."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([rows, columns, torch.ones_like(rows)]).double()


@pytest.mark.parametrize(
    "config",
    [
        {"random_scale": [0.3, 3.0], "hflip": 0.5, "vflip": 0.5},
        {"random_resized_crop": {"scale": [0.1, 0.9]}, "hflip": 0.5},
    ],
    ids=["scale", "crop"],
)
def test_image_mask_and_boxes_stay_on_one_another(config: dict[str, Any]) -> None:
    """A rectangle that is marked in image, mask and box is at the same place in all three after any map."""
    image = torch.zeros(3, *SIDES)
    mask = torch.zeros(SIDES, dtype=torch.uint8)
    image[:, 10:30, 20:44] = 1
    mask[10:30, 20:44] = 1
    box = torch.tensor([[20.0, 10.0, 44.0, 30.0]], dtype=torch.float64)
    seen = 0
    for each in geometries(config):
        moved_image, moved_mask = each.image(image)[0], each.mask(mask, 255)
        (moved_box,), (is_kept,) = each.boxes(box, 1.0)
        inside = (moved_mask == 1).nonzero()
        if not is_kept:
            continue
        seen += 1
        (top, left), (bottom, right) = inside.min(0).values.tolist(), (inside.max(0).values + 1).tolist()
        scale = max(1.0, each.placed.height / each.part.height, each.placed.width / each.part.width)
        assert (torch.tensor([left, top, right, bottom]) - moved_box).abs().max() <= 0.5 * scale + 1e-9
        # Away from the blurred edges the image is what the mask says.
        assert ((moved_image > 0.99) <= (moved_mask == 1)).all()
        assert ((moved_image < 0.01) <= (moved_mask != 1)).all()
    assert seen > 150


def test_scaled_crops_are_the_image_resized_and_cut() -> None:
    """Without rounding (factor 2), the canvas is a window of the resized image."""
    images = torch.randint(0, 256, (3, 16, 24), dtype=torch.uint8)
    for each in geometries({"random_scale": [2.0, 2.0]}, 20, (16, 24), sides=(16, 24)):
        assert each.part.sides == (8, 12)
        window = images[:, each.part.top : each.part.top + 8, each.part.left : each.part.left + 12]
        assert torch.equal(each.image(images), resize(window, 16, 24))
    starts = {(g.part.top, g.part.left) for g in geometries({"random_scale": [2.0, 2.0]}, 300, (16, 24))}
    assert len(starts) > 50


def test_smaller_images_are_padded_at_a_random_place() -> None:
    places = set()
    for each in geometries({"random_scale": [0.5, 0.5]}):
        image, mask = each.image(torch.ones(3, *SIDES)), each.mask(torch.ones(SIDES, dtype=torch.int64), 255)
        assert image.shape == (3, 32, 32) and mask.shape == (32, 32)
        assert ((image[0] > 0.5) == (mask == 1)).all() and (mask[image[0] == 0] == 255).all()
        assert each.placed.sides == (11, 16)  # 40 x 60 fits as 21 x 32, and half of it is 11 x 16
        places.add((each.placed.top, each.placed.left))
    assert len(places) > 80
    assert {top for top, _ in places} == set(range(22))


def test_scales_are_relative_to_the_size_in_the_evaluation() -> None:
    for each in geometries({"random_scale": [1.0, 1.0]}, 20, (20, 30), (40, 60)):
        assert each.part.sides == (20, 30)  # native resolution
    assert {g.part.sides for g in geometries({}, 5, (20, 30))} == {SIDES}


def test_evaluation_fits_the_whole_image_at_the_top_left() -> None:
    each = fitted((40, 60), (32, 32))
    assert each == Geometry(Rectangle(0, 0, 40, 60), Rectangle(0, 0, 21, 32), (32, 32))
    mask = each.mask(torch.zeros(40, 60, dtype=torch.uint8), 255)
    assert (mask[:21] == 0).all() and (mask[21:] == 255).all()
    same = fitted((40, 60), None)
    image = gradient()
    assert torch.equal(same.image(image), image) and torch.equal(same.mask(image[0], 0), image[0])


@pytest.mark.parametrize("canvas", [(32, 32), (80, 90), (7, 100), None])
def test_boxes_on_the_canvas_are_moved_back_to_the_image(canvas: tuple[int, int] | None) -> None:
    boxes = torch.tensor([[0.0, 0.0, 60.0, 40.0], [3.5, 7.0, 30.0, 39.0]], dtype=torch.float64)
    moved, _ = fitted((40, 60), canvas).boxes(boxes)
    back, are_inside = fitted_back((40, 60), canvas).boxes(moved)
    torch.testing.assert_close(back, boxes, rtol=0, atol=1e-12)
    assert are_inside.all()


def test_boxes_in_the_padding_are_cut_off() -> None:
    boxes = torch.tensor([[10.0, 25.0, 20.0, 30.0], [15.0, 10.0, 30.0, 30.0]])
    back, are_inside = fitted_back((40, 80), (32, 32)).boxes(boxes)  # 40 x 80 fits as 16 x 32
    assert are_inside.tolist() == [False, True]
    assert back[1].tolist() == [37.5, 25.0, 75.0, 40.0]


def test_nearest_pixels_are_those_of_torch() -> None:
    mask = torch.randint(0, 12, SIDES, dtype=torch.uint8)
    for canvas in ((17, 23), (80, 90), (40, 7)):
        part = Rectangle(4, 6, 30, 50)
        each = Geometry(part, Rectangle(0, 0, *canvas), canvas)
        expected = torch.nn.functional.interpolate(
            part.of(mask)[None, None].float(), size=canvas, mode="nearest-exact"
        )
        assert torch.equal(each.mask(mask, 0), expected[0, 0].to(torch.uint8))


def test_flips_are_those_of_the_image_alone() -> None:
    flipped = geometries({"hflip": 0.5, "vflip": 0.5}, 400, None)
    keys = Keys(0, 3, torch.arange(400))
    assert [g.hflip for g in flipped] == keys.flags("hflip", 0.5).tolist()
    image = gradient()
    for each in flipped[:20]:
        dims = [dim for dim, is_flipped in ((-1, each.hflip), (-2, each.vflip)) if is_flipped]
        assert torch.equal(each.image(image), image.flip(dims))


def test_boxes_that_a_crop_leaves_too_small_are_dropped() -> None:
    each = Geometry(Rectangle(0, 0, 20, 20), Rectangle(0, 0, 40, 40), (40, 40), hflip=True)
    boxes = torch.tensor([[0, 0, 10, 5], [19.8, 0, 30, 10], [25, 25, 30, 30], [15, 15, 30, 30]]).double()
    moved, kept = each.boxes(boxes, 1.0)
    assert kept.tolist() == [True, False, False, True]
    assert moved[0].tolist() == [20, 0, 40, 10]
    assert moved[3].tolist() == [0, 30, 10, 40]
    assert each.boxes(boxes)[1].tolist() == [True, True, False, True]
    assert each.boxes(torch.zeros(0, 4))[0].shape == (0, 4)


def test_jpeg_decoded_to_a_fraction_lines_up_with_its_mask() -> None:
    """Parts are rounded to the pixels of the reduced image, whatever the format of the image."""
    pixels = gradient(160, 240).to(torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(buffer, "JPEG", quality=95, subsampling=0)
    encoded = read_image(buffer.getvalue(), 3, 0)
    assert isinstance(encoded, EncodedImage)
    reductions = set()
    for each in geometries({"random_resized_crop": {"scale": [0.1, 1.0]}}, 40, (32, 32), sides=(160, 240)):
        reductions.add(each.reduction)
        difference = each.image(encoded)[:2].double() - each.image(pixels)[:2].double()
        assert difference.mean(dim=(1, 2)).abs().max() < 0.6  # of a pixel
    assert reductions >= {1, 2, 4}
