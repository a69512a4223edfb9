from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_train.errors import NoSchedulerError
from hpc_train.launchers.slurm import commands, queue
from hpc_train.launchers.slurm.queue import ELSEWHERE, FORGOTTEN, JobState
from tests.launchers.slurm.programs import Programs, put_programs_first

_DISABLED = "echo 'Slurm accounting storage is disabled' >&2; exit 1"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """slurmctld knows 7 and the array 12, accounting nothing."""
    found = put_programs_first(tmp_path, monkeypatch)
    put_jobs(found, _row("7", "RUNNING", restarts=2, nodes="n[1-2]"), _row("12_3", "PENDING", "Priority"))
    found.put("sacct", _DISABLED)
    put_scontrol(found, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    return found


def put_scontrol(programs: Programs, show_job: str, cluster: str = "a") -> None:
    programs.put(
        "scontrol",
        f'case "$*" in *config*) echo "ClusterName             = {cluster}";; *) {show_job};; esac',
    )


@pytest.fixture(autouse=True)
def _fresh_cluster_name() -> None:
    commands._cluster_name.cache_clear()


def ask(ids: list[str], cluster: str | None = None, **more: Any) -> dict[str, JobState]:
    return {job: state for (job, _), state in queue.ask([(job, cluster) for job in ids], **more).items()}


def _row(
    job: str,
    state: str,
    reason: str = "None",
    restarts: int = 0,
    end: str = "N/A",
    nodes: str = "",
    exit_code: str = "256",
) -> str:
    fields = [
        job,
        state,
        reason,
        str(restarts),
        "2026-11-21T06:05:06",
        end,
        exit_code,
        nodes,
        "digits",
        "/x/s.sh",
    ]
    return "".join(f"{field}\x1f" for field in fields)


def put_jobs(programs: Programs, *rows: str) -> None:
    text = "".join(f"{row}\n" for row in rows)
    (programs.folder / "rows").write_text(text)
    programs.put(
        "squeue",
        f'case "$*" in *--user=*) cat {programs.folder}/rows;; '
        "*) echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1;; esac",
    )


@pytest.mark.parametrize(
    "answer",
    [
        "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
        "echo 'Job 12_4 not found'; exit 1",  # a task of an array that has others (22.05)
    ],
)
def test_a_job_that_slurmctld_does_not_know_is_forgotten(programs: Programs, answer: str) -> None:
    put_scontrol(programs, answer)
    missed = ask(["12_4"])["12_4"]
    assert missed.state == FORGOTTEN and missed.missed_at is not None


def test_squeue_is_read(programs: Programs) -> None:
    found = ask(["7", "12_3"])
    assert found["7"] == JobState(
        "7", "RUNNING", None, 2, "n[1-2]", exit_code="1:0", name="digits", script="/x/s.sh"
    )
    assert (found["12_3"].reason, found["12_3"].start_estimate) == ("Priority", "2026-11-21T06:05:06+00:00")
    assert found["12_3"].is_waiting and not found["7"].is_waiting


@pytest.mark.parametrize(("number", "told"), [("0", "0:0"), ("256", "1:0"), ("9", "0:9"), ("4021", "0:53")])
def test_a_signal_leaves_no_exit_code(programs: Programs, number: str, told: str) -> None:
    put_jobs(programs, _row("7", "FAILED", exit_code=number))
    assert ask(["7"])["7"].exit_code == told


def test_calls_within_10_s_share_one_squeue(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(commands.time, "time", lambda: now)  # however busy the machine is
    for _ in range(1000):
        ask(["7", "12_3"])
    assert len(programs.calls("squeue")) == 1


@pytest.mark.slow
def test_commands_that_ask_at_once_are_answered_by_one_squeue(programs: Programs) -> None:
    programs.put("squeue", f"sleep 0.5; cat {programs.folder}/rows")
    askers = [threading.Thread(target=ask, args=(["7"],)) for _ in range(8)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert len(programs.calls("squeue")) == 1


def test_an_old_or_unwanted_answer_is_not_used(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(["7"])
    ask(["7"], max_age_s=0)
    assert len(programs.calls("squeue")) == 2
    monkeypatch.setattr(commands.time, "time", lambda: 4e9)
    ask(["7"])
    assert len(programs.calls("squeue")) == 3
    monkeypatch.setattr(commands.time, "time", lambda: 3e9)  # the clock was set back
    ask(["7"])
    assert len(programs.calls("squeue")) == 4


def test_a_job_newer_than_the_answer_is_asked_for(programs: Programs) -> None:
    ask(["7"])
    put_jobs(programs, _row("7", "RUNNING"), _row("13", "PENDING"))
    assert ask(["13"])["13"].state == "PENDING"


def test_a_job_that_nobody_knows_is_forgotten_and_not_asked_for_again(programs: Programs) -> None:
    assert ask(["7", "99"])["99"].state == FORGOTTEN
    ask(["7", "99"])
    assert [call for call in programs.calls("squeue") if "--user" in call] == programs.calls("squeue")[:1]
    assert len(programs.calls("sacct")) == 1


def test_accounting_is_asked_for_what_squeue_has_dropped(programs: Programs) -> None:
    rows = [
        "12_[0-1,4%2]\x1fCANCELLED by 1000\x1f2026-11-21T06:05:06\x1f0:0\x1fNone assigned\x1fdigits",
        "12_2\x1fTIMEOUT\x1f2026-11-21T06:05:06\x1f0:15\x1fn1\x1fdigits",
        "99\x1fRUNNING\x1fUnknown\x1f0:0\x1fn1\x1fdigits",
    ]
    programs.put("sacct", "\n".join(f"echo '{row}'" for row in rows))
    found = ask(["7", "12_1", "12_4", "12_2", "99"])
    assert found["12_1"].state == "CANCELLED"
    assert (found["12_4"].state, found["12_4"].reason) == ("CANCELLED", "by 1000")
    assert (found["12_2"].state, found["12_2"].ended) == ("TIMEOUT", "2026-11-21T06:05:06+00:00")
    assert found["99"].state == FORGOTTEN, "slurmctld knows nothing of it: it does not run"
    (call,) = programs.calls("sacct")
    assert "--jobs=12,99 " in call


@pytest.mark.parametrize(
    ("show_job", "expected"),
    [
        ("echo 'JobId=99 JobState=PENDING Reason=BeginTime Restarts=1 NodeList=(null)'", "PENDING"),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "PREEMPTED"),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", None),
    ],
)
def test_accounting_may_have_the_end_before_a_requeue(
    programs: Programs, show_job: str, expected: str | None
) -> None:
    rows = "99\x1fPREEMPTED\x1f2026-11-21T06:05:06\x1f0:0\x1fn1\x1fdigits"
    programs.put("sacct", f"echo '{rows}'")
    put_scontrol(programs, show_job)
    found = ask(["99"]).get("99")
    assert (found and found.state) == expected


def test_a_job_is_not_forgotten_while_accounting_is_silent(programs: Programs) -> None:
    programs.put(
        "sacct", "echo 'sacct: error: Problem talking to the database: Connection refused' >&2; exit 1"
    )
    assert "99" not in ask(["7", "99"])
    ask(["7", "99"])
    assert len(programs.calls("sacct")) == 1


def test_silence_is_shared_too(programs: Programs) -> None:
    programs.put("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    for _ in range(3):
        with pytest.raises(NoSchedulerError, match="Unable to contact"):
            ask(["7"])
    assert len(programs.calls("squeue")) == 1


def test_asks_once_without_a_cache(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HPC_TRAIN_CACHE", str(tmp_path / "file"))
    for _ in range(3):
        ask(["7"])
    assert len(programs.calls("squeue")) == 1
    commands.forget_answer()
    ask(["7"])
    assert len(programs.calls("squeue")) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_an_answer_that_somebody_else_wrote_is_not_believed(programs: Programs, tmp_path: Path) -> None:
    ask(["7"])
    (file,) = (tmp_path / "cache").glob("slurm-*.json")
    os.chown(file, 12345, 12345)
    ask(["7"])
    assert len(programs.calls("squeue")) == 2


def test_a_name_with_a_line_break_makes_no_job(programs: Programs) -> None:
    evil = _row("8", "RUNNING").replace("digits", "x\n7\x1fCANCELLED\x1f")
    put_jobs(programs, _row("7", "RUNNING"), evil)
    assert ask(["7"])["7"].state == "RUNNING"


def test_a_job_that_squeue_does_not_list_yet_is_read_from_scontrol(programs: Programs) -> None:
    put_scontrol(
        programs,
        "echo 'JobId=99 JobName=digits JobState=PENDING Reason=Priority Restarts=1 EndTime=Unknown "
        "NodeList=(null) ExitCode=0:0 Command=/x/my runs/s.sh WorkDir=/x'",
    )
    assert ask(["99"])["99"] == JobState(
        "99", "PENDING", "Priority", 1, None, exit_code="0:0", name="digits", script="/x/my runs/s.sh"
    )


@pytest.mark.parametrize(
    "answer",
    ["echo 'JobId=99 JobName=digits JobState=RUNN'", "echo 'Welcome to a'", "echo timeout >&2; exit 1"],
)
def test_only_an_invalid_job_id_makes_a_missing_job_forgotten(programs: Programs, answer: str) -> None:
    put_scontrol(programs, answer)
    assert "99" not in ask(["99"])


def test_a_forgotten_job_keeps_its_first_time(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_800_000_000.0
    monkeypatch.setattr(commands.time, "time", lambda: now)
    assert ask(["99"])["99"].missed_at == now
    now += 100
    commands.forget_answer()  # after an order, such as a cancel of another job
    assert ask(["99"])["99"].missed_at == now - 100
    commands.forget_answer()
    rows = (programs.folder / "squeue").read_text()
    programs.put("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(NoSchedulerError):
        ask(["99"])
    commands.forget_answer()
    (programs.folder / "squeue").write_text(rows)
    assert ask(["99"])["99"].missed_at == now - 100, "kept while Slurm did not answer"
    put_jobs(programs, _row("99", "PENDING"))
    now += 100
    assert ask(["99"])["99"].state == "PENDING"
    put_jobs(programs)
    now += 100
    assert ask(["99"])["99"].missed_at == now, "it was listed in between"


def test_scontrol_is_asked_about_a_limited_number_of_jobs(programs: Programs) -> None:
    found = ask([str(number) for number in range(100, 130)])
    assert sum("show job" in call for call in programs.calls("scontrol")) == 20
    assert len(found) == 20, "nothing is said about the others"


def test_a_number_of_restarts_that_scontrol_does_not_show_is_unknown(programs: Programs) -> None:
    put_scontrol(programs, "echo 'JobId=99 JobName=digits JobState=RUNNING NodeList=n1 ExitCode=0:0'")
    assert ask(["99"])["99"].restarts is None


def test_a_job_of_another_cluster_is_not_asked_about(programs: Programs) -> None:
    assert ask(["7"], cluster="b")["7"] == JobState("7", ELSEWHERE, "a")
    assert ask(["7"], cluster="a")["7"].state == "RUNNING"
    ask(["99"], cluster="b")
    assert all("99" not in call for name in ("squeue", "scontrol", "sacct") for call in programs.calls(name))
