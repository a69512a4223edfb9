from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.cli.command_line import exit_code_of
from hpc_train.errors import ExitCode, NoSchedulerError
from hpc_train.launchers.slurm import commands
from hpc_train.launchers.slurm.commands import NoAnswerError, RefusedError, run
from tests.launchers.slurm.programs import Programs, put_programs_first

_SILENT = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
_NO_CONFIGURATION = "sbatch: fatal: Could not establish a configuration source"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    return put_programs_first(tmp_path, monkeypatch)


def test_a_program_that_is_not_there_is_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoSchedulerError, match=r"squeue: no such program here.*--local") as raised:
        run(["squeue"], retry=True)
    assert raised.value.exit_code == ExitCode.NO_SCHEDULER
    assert not isinstance(raised.value, NoAnswerError)


@pytest.mark.parametrize(
    "words",
    [
        _SILENT,
        "slurm_load_jobs error: Socket timed out on send/recv operation",
        "squeue: error: ClusterName needs to be specified",
        _NO_CONFIGURATION,
        "sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received",
        "slurm_load_jobs error: Slurm backup controller in standby mode",
        "sacct: error: Problem talking to the database: Connection refused",
        "squeue: error: Munge encode failed: Failed to access /run/munge: No such file or directory",
    ],
)
def test_silence_is_told_from_a_refusal(programs: Programs, words: str) -> None:
    programs.put("squeue", f"echo '{words}' >&2; exit 1")
    with pytest.raises(NoAnswerError) as raised:
        run(["squeue", "-h"])
    assert "`squeue -h` said: " in str(raised.value) and words in str(raised.value)


@pytest.mark.parametrize(
    "words",
    [
        "sbatch: error: Batch job submission failed: Invalid partition name specified",
        "sbatch: error: Invalid account or account/partition combination specified",
        # A site's notice before it is no answer of Slurm.
        "two-factor authentication is required; sbatch: error: Batch job submission failed: Invalid qos",
        "Slurm accounting storage is disabled",
        "slurm_load_jobs error: Invalid job id specified",
    ],
)
def test_a_refusal_has_slurms_words_and_is_not_repeated(programs: Programs, words: str) -> None:
    programs.put("sbatch", f"echo '{words}' >&2; exit 1")
    with pytest.raises(RefusedError) as raised:
        run(["sbatch", "a b"], retry=True)
    assert raised.value.words == words
    assert "`sbatch 'a b'`" in str(raised.value)
    assert len(programs.calls("sbatch")) == 1


def test_a_wrapper_that_returns_0_submits_nothing(programs: Programs) -> None:
    words = "sbatch: error: Batch job submission failed: {}"
    for reason, error in (
        ("Invalid qos", RefusedError),
        ("Socket timed out on send/recv operation", NoAnswerError),
    ):
        programs.put("sbatch", f"echo '{words.format(reason)}' >&2")
        with pytest.raises(error, match=reason):
            run(["sbatch"])
    programs.put("sbatch", f"echo '{words.format('Socket timed out')}' >&2; echo 12")
    assert run(["sbatch"]) == "12\n", "it has tried again"


def test_a_program_that_hangs_is_ended_at_the_limit(programs: Programs) -> None:
    programs.put("squeue", "exec sleep 600")
    with pytest.raises(NoAnswerError, match=r"said nothing for 0\.2 s"):
        run(["squeue"], limit_s=0.2)


@pytest.mark.slow
def test_only_what_asks_for_it_is_repeated(programs: Programs) -> None:
    answers_third = f'test $(wc -l < "$0.calls") -ge 3 && echo here || {{ echo "{_SILENT}" >&2; exit 1; }}'
    programs.put("squeue", answers_third)
    with pytest.raises(NoAnswerError):
        run(["squeue"])
    assert run(["squeue"], retry=True) == "here\n"
    assert len(programs.calls("squeue")) == 3


@pytest.mark.parametrize("words", [_NO_CONFIGURATION, "error: cannot stat file /etc/slurm/slurm.conf"])
def test_a_machine_without_a_configuration_is_asked_once(programs: Programs, words: str) -> None:
    programs.put("scontrol", f"echo '{words}' >&2; exit 1")
    with pytest.raises(NoAnswerError):
        run(["scontrol", "show", "config"], retry=True)
    assert len(programs.calls("scontrol")) == 1


def test_user_formats_change_no_answer_or_order(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    formats = ("SQUEUE_FORMAT", "SACCT_FORMAT", "SCANCEL_STATE")
    for name in (*formats, "SLURM_TIME_FORMAT", "LC_ALL", "SLURM_CONF"):
        monkeypatch.setenv(name, "mine")
    programs.put("squeue", "env")
    programs.put("sbatch", "env")
    asked = dict(line.partition("=")[::2] for line in run(["squeue"]).splitlines())
    assert set(formats) & set(asked) == set()
    assert (asked["SLURM_TIME_FORMAT"], asked["LC_ALL"], asked["TZ"]) == ("standard", "C", "UTC0")
    assert asked["SLURM_CONF"] == "mine"
    assert "LC_ALL=mine\n" in run(["sbatch"]), "the job gets it from there"


def test_output_of_slurm_is_escaped(programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    programs.put("squeue", r"printf '\e]0;title\a' >&2; exit 1")
    assert exit_code_of(lambda: len(run(["squeue"]))) != 0
    printed = capsys.readouterr().err
    assert "\x1b" not in printed and "\\x1b]0;title\\x07" in printed


def test_the_output_of_a_killed_program_is_no_answer(programs: Programs) -> None:
    programs.put("squeue", "kill -KILL $$")
    with pytest.raises(RefusedError, match="exit code -9"):
        run(["squeue"])


def test_own_jobs_have_scripts_with_blanks_and_bars(programs: Programs) -> None:
    programs.put("squeue", "echo '12|/runs/a b|c/x.sh 1'; echo '12|/runs/a b|c/x.sh 1'; echo '9|(null)'")
    assert commands.own_jobs() == [("12", "/runs/a b|c/x.sh 1"), ("9", "(null)")]


def test_jobs_that_have_ended_are_no_error_to_cancel(programs: Programs) -> None:
    programs.put(
        "scancel", "echo 'scancel: error: Kill job error on job id 12: Invalid job id specified' >&2; exit 1"
    )
    commands.cancel_jobs(["12", "13_4"])
    assert programs.calls("scancel") == ["12 13_4"]
    programs.put("scancel", "echo 'scancel: error: Access/permission denied' >&2; exit 1")
    with pytest.raises(RefusedError, match="denied"):
        commands.cancel_jobs(["12"])


def test_nothing_to_cancel_runs_nothing(programs: Programs) -> None:
    programs.put("scancel", "exit 0")
    commands.cancel_jobs([])
    assert programs.calls("scancel") == []


def test_config_is_asked_once(programs: Programs) -> None:
    programs.put("scontrol", "echo 'Configuration data as of 2026'; echo 'MaxArraySize            = 1001'")
    commands.config.cache_clear()
    try:
        assert commands.config()["MaxArraySize"] == commands.config()["MaxArraySize"] == "1001"
    finally:
        commands.config.cache_clear()
    assert programs.calls("scontrol") == ["show config"]


@pytest.mark.parametrize("code", [0, 1])
def test_what_was_said_before_an_order_counts_no_more(programs: Programs, tmp_path: Path, code: int) -> None:
    from hpc_train.launchers.slurm import commands

    commands.shared_answer(10, lambda answer: True, lambda last: {"jobs": {}})
    (file,) = (tmp_path / "cache").glob("slurm-*.json")
    assert json.loads(file.read_text())["jobs"] == {}
    programs.put("scontrol", f"exit {code}")
    if code:
        with pytest.raises(RefusedError):
            commands.release("12_3")
    else:
        commands.release("12_3")
    assert json.loads(file.read_text())["asked"] == 0.0, "older than any answer that is still taken"
    assert programs.calls("scontrol") == ["release 12_3"]
