"""``make gpu-day``: what it decides and computes without a GPU."""

from __future__ import annotations

import gzip
import json
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_throughput import Arm, groups, kernel_difference, measured, take_turns

#: Trains "steps" of a hundredth of a second, in windows of one.
_TRAINS = """
import time
while True:
    time.sleep({step_s})
    print('{{"peak_gib": 1.5}}', flush=True)
"""


def test_arms_that_take_turns_have_a_time_per_round_and_those_that_fail_none(tmp_path: Path) -> None:
    programs = {"fast": _TRAINS.format(step_s=0.01), "slow": _TRAINS.format(step_s=0.05), "fails": "1 / 0"}
    line = r'^\{"peak'
    arms = {
        name: Arm([sys.executable, "-c", program], {}, tmp_path, line) for name, program in programs.items()
    }
    try:
        values = take_turns(arms, rounds=2, window=1)
    finally:
        for arm in arms.values():
            arm.end()
    assert {name: len(times) for name, times in values.items()} == {"fast": 2, "slow": 2}
    assert min(values["slow"] + values["fast"]) > 0
    assert arms["fast"].peak_gib == 1.5 and "ZeroDivisionError" in "".join(arms["fails"].output)


def test_kernels_are_compared_by_name(tmp_path: Path) -> None:
    def trace(name: str, **micros: float) -> Path:
        starts = [10_000, 12_000]  # the second overlaps the first or follows it
        events = [
            {"cat": "kernel", "name": kernel, "ts": start, "dur": dur}
            for start, (kernel, dur) in zip(starts, micros.items(), strict=True)
        ]
        path = tmp_path / f"{name}.json.gz"
        with gzip.open(path, "wt") as file:
            host = {"cat": "cpu_op", "name": "host", "ts": 0, "dur": 1e9}
            json.dump({"traceEvents": [*events, host]}, file)
        return path

    rows = kernel_difference(trace("bare", gemm=4000, copy=2000), trace("ours", fill=1000, gemm=4400))
    assert list(rows) == ["all kernels", "idle between kernels", "copy", "fill", "gemm"], "by difference"
    assert rows["idle between kernels"] == {"bare loop": 0.0, "hpc-train": 0.5}
    assert rows["all kernels"] == {"bare loop": 3.0, "hpc-train": 2.7}
    assert rows["gemm"] == {"bare loop": 2.0, "hpc-train": 2.2}


def test_arms_train_at_the_same_time_where_memory_allows() -> None:
    modes = {"eager": ["bare loop", "Fabric", "hpc-train"], "compiled": ["bare loop", "hpc-train"]}
    (both,) = groups(modes, 10.0, 139.0)
    assert {mode: sorted(names) for mode, names in both.items()} == modes | {
        "eager": ["Fabric", "bare loop", "hpc-train"]
    }
    assert groups(modes, 10.0, 35.0) == [
        {"eager": ["bare loop", "hpc-train", "Fabric"]},
        {"compiled": ["bare loop", "hpc-train"]},
    ]
    assert groups(modes, 10.0, 25.0)[0] == {"eager": ["bare loop", "hpc-train"]}, "the peer is omitted"


def test_what_was_measured_here_is_not_repeated(tmp_path: Path) -> None:
    here = {"device": "H100", "versions": {"torch": "2.15"}}
    other = here | {"versions": {"torch": "2.16"}}
    tables = [{"title": "a", "conditions": here | {"date": "x"}}, {"title": "b", "conditions": other}]
    file = tmp_path / "results.json"
    assert measured(file, here) == set()
    file.write_text(json.dumps({"comparisons": [], "tables": tables}))
    assert measured(file, here) == {"a"} and measured(file, other) == {"b"}


def test_as_many_tests_run_at_a_time_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    assert gpu.num_workers(20 << 30) == 3
    assert gpu.num_workers(1 << 30) == 1
    assert gpu.num_workers(140 << 30) == 12


def test_wheels_are_unpacked_once(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "some-1-py3-none-any.whl", "w") as archive:
        archive.writestr("some/__init__.py", "x = 1")
    for _ in range(2):
        folder = gpu.unpack(tmp_path / "wheels", tmp_path / "unpacked")
    assert (folder / "some" / "__init__.py").read_text() == "x = 1"
    (folder / "some" / "__init__.py").write_text("x = 2")
    gpu.unpack(tmp_path / "wheels", folder)
    assert (folder / "some" / "__init__.py").read_text() == "x = 2"


def test_the_parts_take_twelve_minutes_together() -> None:
    in_time_left = {"epochs", "all-tests"}
    assert sum(limit_s for part, limit_s in gpu.LIMITS.items() if part not in in_time_left) < 12 * 60
