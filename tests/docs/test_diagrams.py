"""docs/diagrams/ is what its script draws, can be read in both color schemes, and shows the schedules."""

from __future__ import annotations

import pytest

from docs.drawing import COLORS
from docs.make_diagrams import FOLDER, drawn
from docs.pipeline_order import timed
from hpc_train.experiment.config.training_sections import ParallelConfig
from hpc_train.experiment.topology.degrees import bubble
from tests.docs.pages import PAGES


def test_the_files_are_what_the_script_draws() -> None:
    made = {path: str(drawing) for path, drawing in drawn()}
    assert {path: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()} == made, (
        "run python -m docs.make_diagrams"
    )


def test_each_is_on_a_page_with_words_instead_of_it() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for path, drawing in drawn():
        shown = pages.partition(f"](diagrams/{path.name})")
        assert shown[1] and shown[0].rpartition("![")[2] == drawing.description, path.name


def test_words_are_inside() -> None:
    for path, drawing in drawn():
        for left, right, y, words in drawing.texts:
            assert left >= 0 and right <= drawing.width and y < drawing.height - 3, (path.name, words)


@pytest.mark.parametrize("scheme", (0, 1), ids=("light", "dark"))
def test_words_have_contrast(scheme: int) -> None:
    for kind in COLORS.keys() - {"text", "faint", "line"}:
        for text in ("text", "faint") if kind == "background" else ("text",):
            values = sorted(_luminance(COLORS[each][scheme]) for each in (text, kind))
            assert (values[1] + 0.05) / (values[0] + 0.05) >= 4.5, (text, kind)


def _luminance(color: str) -> float:
    """Return the relative luminance of WCAG 2.2."""
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize(("ranks", "slots"), [(2, 4), (4, 8)])
def test_schedules_wait_as_long_as_the_formula_says(
    schedule: str, chunks: int, ranks: int, slots: int
) -> None:
    operations = timed(schedule, ranks=ranks, slots=slots, chunks=chunks)
    assert len(operations) == 2 * ranks * slots * chunks == len(set(operations))
    work = sum(operation.end - operation.start for operation in operations)
    waits = 1 - work / (ranks * max(operation.end for operation in operations))
    config = ParallelConfig.model_validate({"strategy": "pipeline", "schedule": schedule})
    assert waits == pytest.approx(bubble(config, ranks, slots))
