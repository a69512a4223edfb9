"""Output of ``sacct`` for the jobs of a run: 22.05 to 24.11."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.launchers.slurm import commands
from hpc_train.launchers.slurm.accounting import gib, job_usage, parsed, seconds
from hpc_train.run.files import read_json, write_json
from tests.launchers.slurm.programs import put_programs_first
from tests.run.runs import small_run

#: Two nodes of 8 cores for an hour; a step of four tasks, the largest of which had 3 GiB.
_END = "2026-11-25T10:00:00"
_JOB = (
    f"12|2|57600|12:00:00||4|64G|{_END}\n12.batch|1|28800|00:10.500|900M|1||{_END}\n"
    f"12.0|2|57600|11:59:49|3G|4||{_END}\n"
)


def test_memory_is_that_of_a_node_and_cpu_time_that_of_the_cores() -> None:
    found = parsed(_JOB)
    assert found is not None
    assert (found.peak_memory_gib, found.requested_memory_gib) == (6.0, 32.0)
    assert found.cpu_efficiency == pytest.approx(12 * 3600 / 57600)


@pytest.mark.parametrize(("request_", "per_node"), [("64G", 32.0), ("?", None)])
def test_slurm_prints_the_requested_memory_of_all_nodes(request_: str, per_node: float | None) -> None:
    found = parsed(_JOB.replace("64G", request_))
    assert found is not None and found.requested_memory_gib == per_node


def test_without_a_gatherer_of_accounting_nothing_was_measured() -> None:
    found = parsed(f"12|1|3600|00:00:00|||8G|{_END}\n")
    assert found is not None
    assert (found.peak_memory_gib, found.cpu_efficiency) == (None, None)
    assert parsed("") is None and parsed("nonsense\n") is None


def test_a_job_that_still_runs_has_no_cpu_time_yet() -> None:
    running = "13|2|57600|00:00:00||4|64G|Unknown\n13.0|2|57600|00:00:00|5G|2||Unknown\n"
    alone, after = parsed(running), parsed(_JOB + running)
    assert alone is not None and after is not None
    assert (alone.peak_memory_gib, alone.cpu_efficiency) == (5.0, None)
    assert after.cpu_efficiency == pytest.approx(12 * 3600 / 57600)


def test_sizes_and_times() -> None:
    assert [gib(text) for text in ("1536M", "1024K", "0", "x", "1.2.3G")] == [1.5, 1 / 1024, 0.0, None, None]
    assert [seconds(text) for text in ("1-02:03:04", "03:04.500", "x")] == [93784.0, 184.5, 0.0]


def test_all_jobs_of_the_run_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = put_programs_first(tmp_path, monkeypatch)
    programs.put("sacct", f"printf '{_JOB}'")
    paths = small_run(tmp_path / "runs")
    assert job_usage(paths) is None and not programs.calls("sacct")
    write_json(paths.run, (read_json(paths.run) or {}) | {"slurm_job_ids": ["12", "14_3"]})
    assert job_usage(paths) is not None
    assert "--jobs=12,14_3" in programs.calls("sacct")[0]
    clusters = {"slurm_job_ids": ["12", "13", "14_3"], "slurm_clusters": ["there", "here", None]}
    write_json(paths.run, (read_json(paths.run) or {}) | clusters)
    monkeypatch.setattr(commands, "cluster_name", lambda: "here")
    assert job_usage(paths) is not None
    assert "--jobs=13,14_3" in programs.calls("sacct")[-1], "12 is another job on this cluster"
    monkeypatch.setattr(commands, "cluster_name", lambda: "elsewhere")
    write_json(paths.run, (read_json(paths.run) or {}) | {"slurm_clusters": ["there"] * 3})
    calls = len(programs.calls("sacct"))
    assert job_usage(paths) is None and len(programs.calls("sacct")) == calls
    write_json(paths.run, (read_json(paths.run) or {}) | {"slurm_clusters": []})
    programs.put("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert job_usage(paths) is None
