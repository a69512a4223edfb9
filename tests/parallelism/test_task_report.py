"""The table of tasks in docs/parallelism.md is what was found, of all tasks under all strategies."""

from __future__ import annotations

from hpc_train.experiment.data_facts.built_in import DATA_SETS, TASKS
from tests.parallelism import task_report
from tests.parallelism.task_cases import CASES, cells
from tests.parallelism.task_report import Result


def test_the_page_says_what_was_found() -> None:
    page = task_report.PAGE.read_text(encoding="utf-8")
    text = task_report.table(task_report.read())
    shown = task_report.updated(page, text, task_report.BEGIN, task_report.END)
    assert shown == page, "run `python -m tests.parallelism.task_report --tables`"


def test_every_task_was_compared_and_is_within_its_limit() -> None:
    assert {case.task for case in CASES} == TASKS.keys()
    listed = {"image_list", "webdataset", "huggingface", "segmentation_folder", "coco", "tokens"}
    assert {case.data["name"] for case in CASES} == listed <= DATA_SETS.keys()
    results = task_report.read()
    assert results.keys() == {str(cell) for cell in cells()}, "run `… task_report --continue`"
    assert all(result.is_within and not result.error for result in results.values())
    for case in CASES:
        compared = [name for name, each in results.items() if case.title in name and each.losses is not None]
        assert {"ddp", "fsdp"} <= {name.split(", ")[-3] for name in compared}


def test_a_cell_says_what_failed_or_is_the_larger_of_its_numbers() -> None:
    title = CASES[0].title
    known = {
        f"{title}, ddp, fp32, 1 ranks": Result(True, 1e-7, 1e-8),
        f"{title}, ddp, fp32, 2 ranks": Result(True, 3e-7, 1e-8),
        f"{title}, ddp, fp64, 1 ranks": Result(True, 0.0, 0.0),
        f"{title}, ddp, fp64, 2 ranks": Result(False, 1.0, 1.0),
        f"{title}, fsdp, fp64, 2 ranks": Result(False, error="ValueError: no"),
        f"{title}, hsdp, fp64, 2 ranks": Result(True, refused="key: a word; write another"),
    }
    lines = task_report.table(known).splitlines()
    assert lines[2].startswith(f"| {title} | 3e-07 | **apart** | **fails** | refused (1) | not run |")
    assert lines[-1].endswith("key: a word; write another") or "1. key: a word; write another" in lines
