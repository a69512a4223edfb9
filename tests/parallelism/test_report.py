"""docs/parallelism.md is of this table of what works together."""

from __future__ import annotations

from hpc_train.experiment.config.problems import Problem
from tests.parallelism import report
from tests.parallelism.cases import FEATURES, SHARDED, STRATEGIES, refusals
from tests.parallelism.report import Result


def shown() -> str:
    page = report.PAGE.read_text(encoding="utf-8")
    return page.partition(report.BEGIN)[2].partition(report.END)[0]


def test_the_page_has_every_strategy_and_feature() -> None:
    head = f"| | {' | '.join(STRATEGIES)} |"
    assert head in shown(), "run `python -m tests.parallelism.report --tables`"
    features, statistics = (titles(table) for table in shown().split("\n\n| BatchNorm"))
    assert features[2:] == [feature.title for feature in FEATURES]
    assert statistics[1:] == ["1 rank", "2 ranks", "3 ranks", "4 ranks"]


def titles(table: str) -> list[str]:
    return [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")]


def test_the_page_has_batchnorms_statistics_under_every_strategy_that_can_share_them() -> None:
    rows = report.batchnorm_table(report.read().values())
    assert not any("not run" in row for row in rows), "run `python -m tests.parallelism.report --continue`"
    assert all(f"{row}\n" in shown() for row in rows)


def test_the_page_says_what_is_refused_and_what_to_write() -> None:
    found = list(refusals())
    assert found, "fully_shard takes no channels_last"
    for strategy, title, problem in found:
        (row,) = [line for line in shown().splitlines() if line.startswith(f"| {title} |")]
        cell = row.split(" | ")[1 + STRATEGIES.index(strategy)]
        assert cell.startswith("refused ("), f"{strategy}, {title}"
        assert any(says(line, strategy, problem) for line in shown().splitlines()), problem


def says(line: str, strategy: str, problem: Problem) -> bool:
    """Return True if a note has the problem's words, maybe with other strategies beside this one."""
    before, _, after = f"{problem.message}; {problem.remedy}".partition(strategy)
    return before in line and strategy in line and line.endswith(after)


def test_the_page_says_what_batchnorm_is_refused_in() -> None:
    (row,) = [line for line in shown().splitlines() if line.startswith("| bf16 |")]
    cells = dict(zip(STRATEGIES, row.removesuffix(" |").split(" | ")[1:], strict=True))
    placed = [name for name in SHARDED if name != "tensor"]  # which shares no layer of such a model
    assert [name for name in STRATEGIES if "with BatchNorm refused" in cells[name]] == placed


def test_the_page_says_what_was_found() -> None:
    results = report.read()
    assert report.updated(report.PAGE.read_text(encoding="utf-8"), report.tables(results.values())) == (
        report.PAGE.read_text(encoding="utf-8")
    ), "run `python -m tests.parallelism.report --tables`"


def test_a_cell_is_the_largest_of_its_cases() -> None:
    results = [
        Result("ddp", ("fp64", "EMA"), True, 1e-15, 2e-13, 1e-14),
        Result("ddp", ("fp64", "EMA", "channels_last"), True, 1e-15, 3e-12, 1e-14),
        Result("ddp", ("bf16", "EMA"), True, 2e-3),
        Result("fsdp", ("fp64", "EMA"), False, 1.0, 1.0, 1.0),
    ]
    rows = report.tables(results).splitlines()
    (ema,) = [row for row in rows if row.startswith("| EMA |")]
    assert ema.startswith("| EMA | 3e-12 | **apart** | not run |")
    (bf16,) = [row for row in rows if row.startswith("| bf16 |")]
    assert bf16.startswith("| bf16 | 2e-03 | not run; with BatchNorm refused (1) |")


def test_of_a_failure_its_last_words_are_kept() -> None:
    text = 'rank 0: Traceback (most recent call last):\n  File "/me/x.py", line 1\nValueError: no\n\nHint'
    assert report.in_a_line(text) == "ValueError: no"
    assert report.in_a_line("rank 0: no answer in 9 s\nrank 1: is gone") == "rank 1: is gone"
