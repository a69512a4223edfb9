from __future__ import annotations

from typing import Any

import pytest

from hpc_train.report.usage import step_seconds


def row(
    step: int, step_s: float | None = None, wait_s: float | None = None, split: str = "train"
) -> dict[str, Any]:
    found: dict[str, Any] = {"split": split, "step": step}
    return found | {
        key: value for key, value in (("step_s", step_s), ("data_wait_s", wait_s)) if value is not None
    }


@pytest.mark.parametrize(
    ("rows", "num_steps", "seconds"),
    [
        ([], 10, None),
        ([row(5), row(10)], 10, None),
        ([row(5, 2.0), row(10, 4.0)], 10, 5 * 2 + 5 * 4),
        # Waits for data do not count.
        ([row(5, 2.0, 0.5)], 5, 5 * 1.5),
        # The first row of an attempt counts as the next one of any attempt.
        ([row(5), row(10, 2.0)], 10, 20),
        ([row(5, 1.0), row(8), row(9), row(10, 2.0)], 10, 5 + 10),
        # What follows the last row with a time counts as that row.
        ([row(5, 2.0), row(7)], 8, 16),
        # Steps that no checkpoint contains do not count.
        ([row(5, 2.0), row(10, 4.0), row(15, 8.0)], 7, 10 + 8),
        ([row(5, 2.0)], 0, 0),
        # Evaluations and other content of the file.
        ([row(5, 2.0), row(5, split="val"), row(10, 2.0)], 10, 20),
        ([{"split": "train"}, {"split": "train", "step": "x"}, row(5, 2.0)], 5, 10),
    ],
)
def test_each_step_counts_once(rows: list[dict[str, Any]], num_steps: int, seconds: float | None) -> None:
    found = step_seconds(rows, num_steps)
    assert (found and found.useful) == seconds
