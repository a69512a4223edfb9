"""Draws docs/report*.webp, the page of ``report`` for made-up runs: ``python -m docs.make_report_picture``.

Needs Debian's chromium, as the tests of the page do.
"""

from __future__ import annotations

import os
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from hpc_train.report.html.collecting import collect
from hpc_train.report.html.page import render
from tests.report.browser import chromium, missing
from tests.report.made_experiments import made_experiments

PICTURES = Path(__file__).parent


def main() -> None:
    """Write the pictures."""
    if reason := missing():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        os.environ["HPC_TRAIN_RUNS"] = folder
        file = Path(folder) / "report.html"
        file.write_text(render(collect(made_experiments(Path(folder), 9))), encoding="utf-8")
        wide = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        wide.goto(file.as_uri())
        clip = {"x": 0, "y": 0, "width": 1280, "height": 1720}
        _save(wide.screenshot(full_page=True, clip=clip), "report.webp")
        sheet: Any = wide.locator(".evaluation:has(.sheet)").first
        _save(sheet.screenshot(), "report_predictions.webp")
        phone = browser.new_page(viewport={"width": 400, "height": 1300}, color_scheme="dark")
        phone.goto(file.as_uri())
        phone.locator("#curves").evaluate("(section) => section.scrollIntoView({ behavior: 'instant' })")
        _save(phone.screenshot(), "report_phone.webp")


def _save(content: bytes, name: str) -> None:
    Image.open(BytesIO(content)).convert("RGB").save(PICTURES / name, lossless=True, method=6)


if __name__ == "__main__":
    main()
