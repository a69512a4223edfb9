"""What is said at submit of saves that take longer than there may be time for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_train.launchers.slurm import commands
from hpc_train.launchers.slurm.options import preemption_grace, save_warnings
from hpc_train.paths import ExperimentPaths
from tests.launchers.slurm.programs import Programs, put_programs_first
from tests.launchers.slurm.scripts import experiment
from tests.launchers.slurm.test_options import saved_in

CONFIG = "PreemptMode = REQUEUE\\nPreemptType = preempt/partition_prio\\nKillWait = 30 sec\\n"
#: As scontrol 22.05 says it.
LOW = "PartitionName=low AllowGroups=ALL Default=YES QoS=N/A GraceTime={} PreemptMode=REQUEUE State=UP"
HIGH = "PartitionName=high Default=NO GraceTime=0 PreemptMode=OFF"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    commands.config.cache_clear()
    commands.partition.cache_clear()
    return put_programs_first(tmp_path, monkeypatch)


def slurm(programs: Programs, grace_s: int, config: str = CONFIG) -> None:
    all_of_them = f"{LOW.format(grace_s)}\\n{HIGH}\\n"
    programs.put(
        "scontrol",
        f"case \"$*\" in *config) printf '{config}';; *high) printf '{HIGH}\\n';;"
        f" *low) printf '{LOW.format(grace_s)}\\n';; *) printf '{all_of_them}';; esac",
    )


def said(tmp_path: Path, save_s: float | None, **keys: Any) -> list[str]:
    folder = ExperimentPaths(tmp_path / "exp")
    if not folder.folder.exists():
        saved_in(folder.folder, "abc", save_s)
    return save_warnings(experiment(slurm=keys), folder)


@pytest.mark.parametrize("partition", [None, "low"])
def test_a_grace_shorter_than_a_save_warns(tmp_path: Path, programs: Programs, partition: str | None) -> None:
    slurm(programs, 30)
    (line,) = said(tmp_path, 13.04, partition=partition)
    assert line.startswith("a job of partition low that is preempted has 30 s, but the longest save so far")
    assert "took 13.0 s" in line and "the last checkpoint is what counts" in line


@pytest.mark.parametrize(
    ("save_s", "grace_s", "keys"),
    [(12.4, 30, {}), (12.4, 0, {}), (None, 1, {}), (26.0, 30, {"partition": "high"})],
)
def test_no_warning_if_a_save_fits(
    tmp_path: Path, programs: Programs, save_s: float | None, grace_s: int, keys: dict[str, Any]
) -> None:
    slurm(programs, grace_s)
    assert said(tmp_path, save_s, **keys) == []


def test_where_nobody_preempts_or_slurm_does_not_say_there_is_no_grace(programs: Programs) -> None:
    slurm(programs, 7)
    assert preemption_grace("low") == ("low", 7)
    assert preemption_grace("") == ("low", 7), "the default partition"
    slurm(programs, 7, CONFIG.replace("partition_prio", "none"))
    commands.config.cache_clear()
    assert preemption_grace("low") == ("low", None)


def test_silence_is_no_warning(tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_ATTEMPTS", 1)
    programs.put("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert said(tmp_path, 1000.0, signal_lead_s=9999) == []


def test_a_lead_too_short_for_three_saves_is_said(tmp_path: Path, programs: Programs) -> None:
    slurm(programs, 3600)
    (line,) = said(tmp_path, 101.0, signal_lead_s=300)
    assert "begins 300 s before" in line and "raise slurm.signal_lead_s" in line
    (line,) = said(tmp_path, 101.0, time_limit="10min")
    assert "begins 300 s before" in line and "raise slurm.time_limit" in line
    assert said(tmp_path, 101.0, time_limit="11min") == []
