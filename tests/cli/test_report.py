from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.paths import RunPaths, runs_root
from tests.cli.commands import hpc_train, stderr_of
from tests.report.made_runs import made_sweep


@pytest.fixture
def runs() -> list[RunPaths]:
    return made_sweep(runs_root(), 3, steps=100)


def test_a_page_is_written_and_replaced(runs: list[RunPaths]) -> None:
    file = Path("report.html")
    done = hpc_train("report", "sweep", "-o", file)
    assert done.code == 0 and done.out.startswith("report.html  3 runs  0."), done.err
    assert "0000000002" in file.read_text()
    assert hpc_train("report", "0000000001", "-o", file).out.startswith("report.html  1 run ")
    assert "0000000002" not in file.read_text()
    assert [path.name for path in Path().iterdir()] == ["report.html"]


def test_runs_are_compared_by_the_metric(runs: list[RunPaths]) -> None:
    assert hpc_train("report", "sweep", "-o", "loss.html", "--metric", "train/loss").code == 0
    assert "compared by train/loss (min)" in Path("loss.html").read_text()
    done = hpc_train("report", "sweep", "-o", "f1.html", "--metric", "f1")
    assert done.code == 2 and "--metric: f1 is in no run's metrics.jsonl; there are train/" in done.err
    assert not Path("f1.html").exists()


def test_a_page_replaces_nothing_but_a_page(runs: list[RunPaths]) -> None:
    Path("link.html").symlink_to("exp.yaml")
    Path("folder.html").mkdir()
    for target, code, words in (
        ("exp.yaml", 2, "must end in .html"),
        ("link.html", 74, "exists and is not a plain file"),
        ("folder.html", 74, "exists and is not a plain file"),
        ("none/report.html", 74, "there is no folder none; make the folder first"),
        (runs[0].folder / "report.html", 2, "inside run folder"),
    ):
        assert words in stderr_of(code, "report", "sweep", "-o", target)
    assert hpc_train("report", "other", "-o", "report.html").code == 2


@pytest.mark.slow
def test_the_page_of_a_thousand_runs_has_less_than_20_mb(tmp_path: Path) -> None:
    made_sweep(runs_root(), 1000, steps=200)
    file = tmp_path / "report.html"
    assert hpc_train("report", "sweep", "-o", file).code == 0
    assert 1 << 20 < file.stat().st_size < 20 << 20
