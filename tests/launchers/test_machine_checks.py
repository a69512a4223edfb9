"""What ``doctor`` says of a machine by its report; and the report itself."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_train.launchers import machine_report
from hpc_train.launchers.base import Level
from hpc_train.launchers.machine_checks import Machine, clock_lead_s, judged, parsed, this_machine
from hpc_train.paths import runs_root

GOOD: dict[str, Any] = {
    "host": "n1",
    "python": "3.12.1",
    "executable": "/opt/python",
    "nofile": [65536, None],
    "memlock": [65536, 65536],
    "rdma": [],
    "missing": [],
    "quota": "",
    "shm": {"bytes": 64 * 2**20},
    "folder": "",
    "free_bytes": 2**40,
    "clock_lead_s": 0.01,
    "torch": {"version": "2.11", "cuda": "13.0", "nccl": "2.28.3", "gpus": ["H100", "H100"]},
}


def bad(facts: dict[str, Any], **machine: Any) -> dict[str, Level]:
    """Return check → level of what is not ok."""
    node = Machine("node n1", GOOD | facts, Path("/runs"), clock_lead_s=0.0, is_node=True, **machine)
    found = judged(node)
    assert all(each.why and each.remedy for each in found if each.level is not Level.OK)
    return {each.check.partition(".")[2]: each.level for each in found if each.level is not Level.OK}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, {}),
        ({"python": "3.9.18"}, {"python": Level.ERROR}),
        ({"missing": ["torch", "numpy"], "torch": {}}, {"modules": Level.ERROR}),
        ({"torch": {"error": "ImportError: libcudart.so.13"}}, {"torch": Level.ERROR}),
        ({"nofile": [256, 4096]}, {"nofile": Level.WARNING}),
        ({"nofile": [None, None]}, {}),
        ({"rdma": ["mlx5_0"]}, {"memlock": Level.WARNING}),
        ({"missing": ["wandb"]}, {"modules": Level.WARNING}),
        ({"missing": ["wandb", "numpy"]}, {"modules": Level.ERROR}),
        ({"rdma": ["mlx5_0"], "memlock": [None, None]}, {}),
        ({"folder": "Read-only file system"}, {"runs": Level.ERROR}),
        ({"free_bytes": 10**9}, {"space": Level.WARNING}),
        ({"quota": "/home 12G* 10G 11G 6days"}, {"quota": Level.ERROR}),
        ({"shm": {"error": "Read-only file system"}}, {"shm": Level.ERROR}),
        ({"clock_lead_s": -30.0}, {"clock": Level.WARNING}),
        ({"clock_lead_s": "late"}, {}),
    ],
)
def test_a_fact_of_a_machine(facts: dict[str, Any], expected: dict[str, Level]) -> None:
    assert bad(facts) == expected


def test_a_file_that_requests_gpus_needs_them() -> None:
    blind = {"torch": {"version": "2.11", "cuda": None, "gpus": []}}
    assert bad(blind) == {}
    assert bad(blind, wants_gpu=True) == {"gpu": Level.ERROR}


def test_gpus_are_named_with_their_peak_and_rocm_as_not_tested() -> None:
    facts = GOOD["torch"] | {"cuda": None, "hip": "7.0", "gpus": ["AMD Instinct MI300X"]}
    found = judged(Machine("here", GOOD | {"torch": facts}, Path("/runs")))
    (shown,) = (each.what for each in found if each.check == "machine.torch")
    assert "ROCm 7.0 (not tested)" in shown and "1307.4 TFLOP/s in bf16" in shown


def test_shared_memory_smaller_than_what_loaders_read_ahead_is_a_warning() -> None:
    assert bad({}, prefetched_bytes=64 * 2**20) == {}
    assert bad({}, prefetched_bytes=64 * 2**20 + 1) == {"shm": Level.WARNING}


def test_a_report_of_this_machine_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_report, "_torch", lambda: {"version": "2", "cuda": None, "gpus": []})
    facts = parsed(json.dumps(machine_report.report(str(tmp_path))))
    assert facts.keys() == GOOD.keys()
    assert facts["missing"] == [] and abs(facts["clock_lead_s"]) < 2
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_missing_is_part_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_report, "_torch", dict)
    assert machine_report.report("/no/folder")["folder"] == "No such file or directory"


def test_what_others_print_around_the_report_is_ignored() -> None:
    """A site's Python may greet at the start and at the end."""
    assert parsed('Welcome\n{"a": 1}\nGoodbye\n') == {"a": 1}


@pytest.mark.parametrize("text", ["", "[]", "nonsense", '{"a": 1', '1\n"a"'])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parsed(text)


@pytest.mark.slow
def test_this_machine_can_train_and_is_left_as_it_was() -> None:
    found = this_machine()
    assert {each.check for each in found} >= {"machine.python", "machine.torch", "machine.runs"}
    assert not [each for each in found if each.level is Level.ERROR]
    assert not runs_root().exists()


def test_runs_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HPC_TRAIN_RUNS", str(tmp_path / "file/runs"))
    (found,) = this_machine()
    assert (found.check, found.level) == ("machine.runs", Level.ERROR)
    assert "Not a directory" in found.what and "HPC_TRAIN_RUNS" in found.remedy


def test_the_report_needs_nothing_but_the_standard_library() -> None:
    """It runs on nodes with whatever Python is there."""
    source = Path(machine_report.__file__)
    listed = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import runpy; runpy.run_path({str(source)!r}, run_name='x')"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert listed.returncode == 0, listed.stderr
    assert "hpc_train" not in source.read_text().replace("``", "").partition('"""\n\n')[2]


def test_the_clocks_lead_is_over_the_file_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: (tmp_path / "clock").stat().st_mtime + 30)
    assert clock_lead_s(tmp_path) == pytest.approx(30)
