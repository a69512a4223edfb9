"""Slurm's answers to ``sbatch --test-only``, and the requests at fault; more of them on a real Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_train.errors import NoSchedulerError
from hpc_train.launchers.base import JobForecast, StartRequest
from hpc_train.launchers.slurm import commands, job_refusals, queue
from hpc_train.launchers.slurm.launcher import SlurmLauncher
from hpc_train.paths import ExperimentPaths, RunPaths
from tests.launchers.slurm.programs import Programs, put_programs_first
from tests.run.runs import small_experiment

_NODES = "echo '32|256000|gpu:a100:4|80gb,GPU_MEM:80GB,2080ti'"
_NO_SUCH_NODES = "echo 'allocation failure: Requested node configuration is not available' >&2; exit 1"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """A Slurm of one partition, ``low``, and one node, which accepts every request."""
    programs = put_programs_first(tmp_path, monkeypatch)
    programs.put("sbatch", "true")
    programs.put("squeue", "true")
    programs.put("srun", "true")
    programs.put("sinfo", _NODES)
    put_partition(programs)
    monkeypatch.setattr(commands, "_ATTEMPTS", 1)
    for function in (commands.config, commands.partition):
        function.cache_clear()
    return programs


def put_partition(programs: Programs, **values: str) -> None:
    line = " ".join(f"{key}={value}" for key, value in ({"PartitionName": "low"} | values).items())
    programs.put("scontrol", f"echo '{line} Default=YES'; echo 'MaxArraySize = 1001'")


def forecast(folder: Path, **slurm: Any) -> JobForecast:
    experiments = ExperimentPaths(folder / "runs/small")
    request = StartRequest(RunPaths(experiments.folder / "abc"), small_experiment(slurm=slurm))
    (job,) = SlurmLauncher().forecast(experiments, [request])
    return job


def lines(job: JobForecast) -> list[str]:
    assert all(problem.remedy for problem in job.problems)
    return [f"{problem.key}: {problem.message}" for problem in job.problems]


def test_a_request_that_slurm_refuses_is_about_a_key(tmp_path: Path, programs: Programs) -> None:
    programs.put("sbatch", "echo 'allocation failure: Invalid qos specification' >&2; exit 1")
    job = forecast(tmp_path, qos="nope")
    assert lines(job) == ["slurm.qos: Slurm refuses it: Invalid qos specification"]
    assert job.note == "Invalid qos specification"


def test_nodes_that_are_down_are_no_refusal(tmp_path: Path, programs: Programs) -> None:
    """Slurm uses the same message for nodes that it does not have."""
    programs.put("sbatch", _NO_SUCH_NODES)
    assert lines(forecast(tmp_path, gpus_per_node=4)) == []
    expected = ["slurm.gpus_per_node: 5, but a node has at most 4"]
    assert lines(forecast(tmp_path, gpus_per_node=5)) == expected
    put_partition(programs, TotalNodes="2")
    commands.partition.cache_clear()
    assert lines(forecast(tmp_path, gpus_per_node=5)) == [], "sinfo hides a powered-down node"


@pytest.mark.parametrize(
    ("values", "request_", "expected"),
    [
        ({"MaxNodes": "1"}, {"nodes": 2}, "gets at most 1 (MaxNodes)"),
        ({"MinNodes": "3"}, {"nodes": "1-2"}, "needs at least 3 (MinNodes)"),
        ({"MaxNodes": "UNLIMITED"}, {"nodes": 2}, "2, but the partition has 1"),
        ({"MaxNodes": "1"}, {"spare_nodes": 1}, "2 nodes with the spare ones, but"),
    ],
)
def test_numbers_of_nodes(
    tmp_path: Path, programs: Programs, values: dict[str, str], request_: dict[str, Any], expected: str
) -> None:
    programs.put("sbatch", _NO_SUCH_NODES)
    put_partition(programs, **values)
    assert any(expected in line for line in lines(forecast(tmp_path, **request_)))


@pytest.mark.parametrize(
    ("constraint", "missing"),
    [
        ("GPU_MEM:80GB", []),
        ("[80gb*2|2080ti*1]", []),
        ("(80gb|GPU_MEM:80GB)", []),
        ("[80gb*1&40gb*1]", ["40gb"]),
        ("h100|gpu_mem:80GB", ["h100", "gpu_mem:80GB"]),
        ("h100%2", []),  # not a list of features
    ],
)
def test_whole_feature_names(tmp_path: Path, programs: Programs, constraint: str, missing: list[str]) -> None:
    programs.put("sbatch", _NO_SUCH_NODES)
    features = [line.split()[1].rstrip(",") for line in lines(forecast(tmp_path, constraint=constraint))]
    assert features == missing


@pytest.mark.parametrize(
    ("limit", "partition", "accounting", "qos", "is_refused"),
    [
        ("UNLIMITED", "low", "(null)", "", False),
        ("01:00:00", "low", "(null)", "", False),
        ("00:30:00", "low", "(null)", "PartitionTimeLimit", True),
        ("00:30:00", "low,high", "(null)", "", False),
        ("00:30:00", "low", "accounting_storage/slurmdbd", "DenyOnLimit", True),
        ("00:30:00", "low", "accounting_storage/slurmdbd", "PartitionTimeLimit", False),
    ],
)
def test_a_time_limit_above_the_partitions(
    tmp_path: Path,
    programs: Programs,
    limit: str,
    partition: str,
    accounting: str,
    qos: str,
    is_refused: bool,
) -> None:
    text = f"PartitionName=low MaxTime={limit} Default=YES"
    programs.put("scontrol", f"echo '{text}'; echo 'AccountingStorageType = {accounting}'")
    programs.put("sacctmgr", f"echo {qos}")
    expected = "slurm.time_limit: 60 min exceed the 30 min of partition low"
    job = forecast(tmp_path, partition=partition, time_limit="1h")
    assert lines(job) == ([expected] if is_refused else [])


def test_sbatch_defaults_of_a_user(
    tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.put("sbatch", _NO_SUCH_NODES)
    monkeypatch.setenv("SBATCH_PARTITION", "big")
    forecast(tmp_path)
    assert programs.calls("sinfo")[0].endswith("--partition=big")


def test_a_machine_without_slurm_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert SlurmLauncher().forecast(ExperimentPaths(tmp_path), []) == []


def test_a_slurm_that_does_not_answer_is_no_refusal(tmp_path: Path, programs: Programs) -> None:
    programs.put("sbatch", "echo Unable to contact slurm controller >&2; exit 1")
    with pytest.raises(NoSchedulerError):
        forecast(tmp_path)


def test_the_earliest_start_is_read(tmp_path: Path, programs: Programs) -> None:
    start = "Job 1 to start at 2026-11-25T01:42:26 using 4 processors on nodes n[1-2] in partition low"
    programs.put("sbatch", f"echo 'sbatch: {start}' >&2")
    job = forecast(tmp_path)
    assert (job.earliest_start, job.nodes) == ("2026-11-25T01:42:26+00:00", "n[1-2]")
    programs.put("sbatch", "echo fine")
    assert forecast(tmp_path).earliest_start is None


@pytest.mark.parametrize(
    ("reason", "key"),
    [
        ("PartitionTimeLimit", "slurm.time_limit"),
        ("QOSMaxWallDurationPerJobLimit", "slurm.time_limit"),
        ("QOSMaxCpuPerJobLimit", "slurm.cpus_per_gpu"),
        ("AssocMaxNodePerJobLimit", "slurm.nodes"),
        ("QOSMaxGRESPerJob", "slurm.gpus_per_node"),
        ("MaxMemPerLimit", "slurm.mem_gb"),
        ("QOSMinGRES", "slurm.gpus_per_node"),
        ("AssocMaxCpuMinutesPerJobLimit", "slurm.time_limit"),
        ("DependencyNeverSatisfied", "slurm.dependency"),
        ("PartitionInactive", None),  # until an administrator sets it up again
        ("QOSMaxCpuPerUserLimit", None),
        ("AssocGrpGRES", None),
        ("Priority", None),
    ],
)
def test_a_pending_reason_is_about_a_key(reason: str, key: str | None) -> None:
    assert queue.key_at_fault(reason) == key
    problems = job_refusals.never_starts(reason, small_experiment(slurm={})) if key else []
    assert [problem.key for problem in problems] == ([key] if key else [])
    words = {"QOSMinGRES": "at least the minimum", "DependencyNeverSatisfied": "take it out"}
    assert all(words.get(reason, "") in problem.remedy for problem in problems)


def test_user_options_of_sinfo_hide_no_nodes(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SINFO_PARTITION", "high")
    programs.put("sinfo", 'echo "[$SINFO_PARTITION]"')
    assert commands.run(["sinfo"]) == "[]\n"
