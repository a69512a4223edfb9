"""Draws docs/report.png, the page of ``report`` for a made-up sweep: ``python -m docs.make_report_picture``.

Needs Debian's chromium, as the tests of the page do.
"""

from __future__ import annotations

import os
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image

from hpc_train.report.html.collecting import collect
from hpc_train.report.html.page import render
from tests.report.browser import chromium, missing
from tests.report.made_runs import made_sweep

PICTURE = Path(__file__).with_name("report.png")
#: Fits the table of runs and two rows of charts.
_SIZE = {"width": 1400, "height": 1180}


def main() -> None:
    """Write the picture."""
    if reason := missing():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        os.environ["HPC_TRAIN_RUNS"] = folder
        file = Path(folder) / "report.html"
        file.write_text(render(collect(made_sweep(Path(folder), 6))), encoding="utf-8")
        page = browser.new_page(viewport=_SIZE, color_scheme="light")
        page.goto(file.as_uri())
        page.locator(".frame").first.focus()
        page.keyboard.press("ArrowLeft")
        Image.open(BytesIO(page.screenshot())).convert("RGB").save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
