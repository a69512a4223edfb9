"""What pages say of costs is in benchmarks/results/."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.checkpoint import TARGETS

REPOSITORY = Path(__file__).parents[2]


def test_checkpoints_cost_what_the_page_says_and_no_more_than_they_may() -> None:
    kept = json.loads((REPOSITORY / "benchmarks" / "results" / "checkpoint.json").read_text(encoding="utf-8"))
    medians = kept["ratios, medians"]
    assert {name: most for name, most in TARGETS.items() if medians[name] > most} == {}
    page = (REPOSITORY / "docs" / "recovery.md").read_text(encoding="utf-8")
    for said in (
        f"{medians['stall, ours / torch.save']:.1%}",
        f"{medians['stall, ours / DCP']:.0%}",
        f"{medians['stall with nothing beside, ours / torch.save']:.0%}",
        f"{medians['stall with nothing beside, ours / DCP']:.0%}",
    ):
        assert said.replace("%", " %") in page, f"{said} is not on the page; {medians}"
    assert f"{medians['whole save, ours / raw']:.2f} times a raw write" in page


def test_a_pipelines_bubble_is_what_the_page_says() -> None:
    kept = json.loads((REPOSITORY / "benchmarks" / "results" / "pipeline.json").read_text(encoding="utf-8"))
    page = (REPOSITORY / "docs" / "parallelism.md").read_text(encoding="utf-8")
    for schedule, slots in kept["bubble"].items():
        cells = [
            f"{each['measured']:.0%} / {each['formula']:.0%}".replace("%", "") for each in slots.values()
        ]
        assert f"| `{schedule}` | {' | '.join(cells)} |" in page
