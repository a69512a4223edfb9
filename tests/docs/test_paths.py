"""Files of this repository that pages and the catalogue of faults name exist."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_TOP = "tests|hpc_train|docs|slurm_templates|envs|examples|benchmarks"
#: No pattern, and no folder of a run or a plug-in: ``…/tests/``, ``my_tests/``.
_PATH = re.compile(rf"(?<![\w/.…-])(?:\.\./)?((?:{_TOP})/[\w./*<{{-]*[\w/])")
PAGES = (
    REPOSITORY / "README.md",
    REPOSITORY / "tests/faults/catalogue.yaml",
    *sorted((REPOSITORY / "docs").glob("*.md")),
)


def test_every_path_that_a_page_names_exists() -> None:
    named = {(page.name, path) for page in PAGES for path in _PATH.findall(page.read_text())}
    assert len(named) > 40
    plain = {(page, path) for page, path in named if not set("*<{") & set(path)}
    assert {(page, path) for page, path in plain if not (REPOSITORY / path).exists()} == set()
