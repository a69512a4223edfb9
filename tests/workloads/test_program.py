"""The words of a program's command, its metrics, its working folder, and the checks before it is queued."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.program_section import ProgramConfig
from hpc_train.experiment.config.schema import Experiment, Program
from hpc_train.experiment.plan.planning import make_plan
from hpc_train.experiment.validate.loading import load
from hpc_train.experiment.workload import workload_of
from hpc_train.paths import RunPaths
from hpc_train.rank.env import RankFacts
from hpc_train.rank.signals import StopFlag
from hpc_train.run.metric_rows import iter_rows
from hpc_train.workloads import supervisor
from hpc_train.workloads.program import ProgramWorkload
from hpc_train.workloads.program_command import ProgramStart, Rendezvous, command_of, executable, rendered
from hpc_train.workloads.program_metrics import recover_rows
from hpc_train.workloads.supervisor import has_stopped
from tests.workloads.programs import TEXT, program_metrics, send, write_program


def test_an_executable_with_a_path_is_taken_as_it_is() -> None:
    for name in ("/bin/sh", "./run.sh", "no-such"):
        assert executable(name) == name
    assert executable("python") == sys.executable


@pytest.mark.parametrize(("value", "style", "words"), [
    (0.1, "--key=value", ["--lr=0.1"]),
    (3e-4, "--key value", ["--lr", "0.0003"]),
    (True, "--key=value", ["--lr"]),
    (False, "--key value", []),
    (None, "--key=value", []),
    ([1, 2], "--key=value", ["--lr", "1", "2"]),
    (["a b", "c"], "--key value", ["--lr", "a b", "c"]),
    (True, "key=value", ["lr=true"]),
    (None, "key=value", ["lr=null"]),
    ([1, "a", False], "key=value", ["lr=[1,a,false]"]),
    ("", "--key=value", ["--lr="]),
])  # fmt: skip
def test_an_argument_is_rendered_by_its_style(value: Any, style: str, words: list[str]) -> None:
    assert rendered("lr", value, style) == words


def test_names_in_braces_are_replaced_and_a_resume_adds_its_arguments() -> None:
    program = ProgramConfig.model_validate({
        "command": ["torchrun", "--nnodes={nodes}", "{{x}}"],
        "args": {"seed": "{seed}", "deep": [1]},
        "resume": {"if_exists": "out/*.pt", "args": ["--from", "{run}/a"]},
    })  # fmt: skip
    values = {"nodes": "2", "seed": "7", "run": "/runs/x"}
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    words = [torchrun, "--nnodes=2", "{x}", "--seed=7", "--deep", "1"]
    assert command_of(program, values, resumes=False) == words
    assert command_of(program, values, resumes=True) == [*words, "--from", "/runs/x/a"]


@pytest.mark.parametrize("per", ["rank", "node", "job"])
def test_programs_that_start_ranks_meet_at_the_port_of_the_attempt(tmp_path: Path, per: str) -> None:
    """Else torchrun takes 29500, and a second run on the node fails."""
    job = Program.model_validate({"name": "prog", "program": {"command": ["torchrun"], "per": per}})
    meeting = Rendezvous("host", 4321, str(tmp_path))
    start = ProgramStart(job, RunPaths(tmp_path), 1, RankFacts(), meeting, resumes=False)
    variables = start.environment()
    assert (variables["MASTER_PORT"], "RANK" in variables) == ("4321", per == "rank")
    assert variables.get("PET_MASTER_PORT") == (None if per == "rank" else "4321")


def test_relative_places_of_modules_are_those_of_the_folder_of_submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program starts in another folder."""
    monkeypatch.setenv("PYTHONPATH", "/a:src::../b")
    RunPaths(tmp_path).run.write_text(json.dumps({"code": {"folder": "/home/me/code"}}))
    job = Program.model_validate({"name": "prog", "program": {"command": ["python"]}})
    meeting = Rendezvous("host", 4321, str(tmp_path))
    variables = ProgramStart(job, RunPaths(tmp_path), 1, RankFacts(), meeting, resumes=False).environment()
    assert variables["PYTHONPATH"] == "/a:/home/me/code/src:/home/me/code/../b"


def test_a_file_with_a_program_is_a_job_of_its_own_kind(tmp_path: Path) -> None:
    loaded = load(write_program(tmp_path, TEXT + "sweep: {grid: {program.args.lr: [0.1, 0.2]}}\n"))
    assert isinstance(loaded.experiment, Program) and not isinstance(loaded.experiment, Experiment)
    assert isinstance(workload_of(loaded.experiment), ProgramWorkload)
    first, second = make_plan(loaded).runs
    assert first.id != second.id and first.total_steps is None and first.layout is None
    assert isinstance(second.experiment, Program) and second.experiment.program.args["lr"] == 0.2


def test_homes_and_variables_are_expanded_in_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shell reads what a program receives."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DATA", "/scratch/d")
    arguments = "args: {a: ~/x, b: $DATA/x, c: 2~3, d: $x, e: ~nobody-here/x}"
    text = TEXT.replace("train.py]", "train.py, --data=~/d]")
    text = text.replace("args: {steps: 20}", f"{arguments}\n  env: {{E: '${{DATA}}'}}")
    with pytest.raises(BadFileError) as caught:
        load(write_program(tmp_path, text))
    remedies = [str(line).rpartition("; ")[2] for line in caught.value.problems]
    assert remedies == [
        "write --data=/home/me/d",
        "write /home/me/x",
        "write /scratch/d/x",
        "write the path in full",
        "write /scratch/d",
    ]


def test_a_key_of_our_trainer_does_not_go_with_a_program(tmp_path: Path) -> None:
    with pytest.raises(BadFileError) as caught:
        load(write_program(tmp_path, TEXT + "optimization: {epochs: 3}\n"))
    (line,) = caught.value.problems
    assert "exp.yaml:9:1: optimization: belongs to hpc-train's own trainer" in line


def test_a_missing_script_is_reported_before_queueing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_program(tmp_path, TEXT.replace("train.py", "trian.py"))
    monkeypatch.chdir(file.parent)
    job = load(file).experiment
    (problem,) = workload_of(job).missing_code([job], lambda: None)
    assert (problem.path, problem.remedy) == (("program", "command", 1), "did you mean train.py?")
    job = load(file, ["program.command=[torchrunn, train.py]"]).experiment
    (problem,) = workload_of(job).missing_code([job], lambda: None)
    assert problem.path == ("program", "command", 0) and "torchrun" in problem.remedy
    job = load(file, ["program.command=[python, -m, train, out.json]"]).experiment
    assert workload_of(job).missing_code([job], lambda: None) == []


@pytest.mark.parametrize(("content", "command", "message"), [
    (b"echo 1\n", "[./run.sh]", "./run.sh does not begin with #!"),
    (b"#!/bin/bash\r\necho 1\r\n", "[./run.sh]", "./run.sh has line ends of Windows"),
    (b"cd x\r\n", "[bash, run.sh]", "run.sh has line ends of Windows"),
    (b"echo 1\n", "[bash, run.sh]", None),
    (b"#!/bin/bash\n", "[./run.sh]", None),
    (b"\x7fELF\0", "[./run.sh]", None),
])  # fmt: skip
def test_a_script_that_cannot_be_read_is_reported_before_queueing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, command: str, message: str | None
) -> None:
    file = write_program(tmp_path)
    monkeypatch.chdir(file.parent)
    Path("run.sh").write_bytes(content)
    Path("run.sh").chmod(0o700)
    job = load(file, [f"program.command={command}"]).experiment
    problems = workload_of(job).missing_code([job], lambda: None)
    assert [problem.message.partition(", ")[0] for problem in problems] == (
        [] if message is None else [message]
    )


def test_rows_of_a_file_become_rows_of_the_run(tmp_path: Path) -> None:
    source = tmp_path / "m.jsonl"
    metrics = program_metrics(tmp_path, 1, jsonl="m.jsonl")
    metrics.poll()
    assert metrics.newest_at is None
    lines = [
        {"step": 1, "loss": 2},
        {"step": 2, "loss": "nan", "val_loss": 3.5},
        {"loss": 1},
        {"step": 2, "loss": 9},
        {"step": 1e300, "loss": 9},
        {"total": math.inf, "progress": 1},
        {"total": 9, "progress": math.nan},
    ]
    damaged = ["no JSON", "[" * 99999, '{"step": 3, "lo']
    source.write_text("\n".join([*map(json.dumps, lines), *damaged]))
    metrics.poll()
    assert metrics.newest_at is not None and metrics.step == 2 and metrics.total_steps is None
    with source.open("a") as file:
        file.write('ss": 1.5}\n')
    metrics.finish()
    rows = [(row["split"], row["step"], row.get("loss")) for row in iter_rows(tmp_path / "metrics.jsonl")]
    assert rows == [("train", 1, 2.0), ("train", 2, None), ("val", 2, 3.5), ("train", 3, 1.5)]


def test_the_next_attempt_withdraws_the_rows_that_it_repeats(tmp_path: Path) -> None:
    source = tmp_path / "m.jsonl"
    for attempt, steps in ((1, range(1, 8)), (2, range(6, 10))):
        metrics = program_metrics(tmp_path, attempt, jsonl="m.jsonl")
        with source.open("a") as file:
            file.writelines(json.dumps({"step": step, "loss": attempt}) + "\n" for step in steps)
        metrics.finish()
    rows = [(row["step"], row["attempt"]) for row in iter_rows(tmp_path / "metrics.jsonl")]
    assert rows == [*((step, 1) for step in range(1, 6)), *((step, 2) for step in range(6, 10))]


def test_a_resume_of_a_session_withdraws_the_rows_behind_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if the next row comes later, and if evaluations are not counted in steps of the training."""
    for attempt, messages in enumerate((
        [["rows", [[1.0, step, "train", {"loss": 1.0}] for step in range(1, 8)]]],
        [["resumed", 5]],
        [["resumed", 5], ["rows", [[2.0, 5, "val", {"loss": 3.0}], [2.0, 2, "val", {"loss": 3.0}]]]],
        [["resumed", 5], ["rows", [[2.0, 5, "train", {"loss": 3.0}], [2.0, 8, "train", {"loss": 2.0}]]]],
    ), start=1):  # fmt: skip
        metrics = program_metrics(tmp_path, attempt)
        send(tmp_path, attempt, *messages)
        metrics.finish()
        has_dropped = "is dropped" in capsys.readouterr().out
        assert has_dropped == (attempt > 2)
    rows = [(row["split"], row["step"], row["attempt"]) for row in iter_rows(tmp_path / "metrics.jsonl")]
    assert rows == [*(("train", step, 1) for step in range(1, 6)), ("val", 5, 3), ("train", 8, 4)]


def test_rows_that_a_killed_supervisor_had_not_read_are_recovered(tmp_path: Path) -> None:
    rows = [[1.0, step, "train", {"loss": 1.0}] for step in range(1, 7)]
    messages = [["rows", rows[:3]], ["saved", 2], ["rows", rows[3:]], ["saved", 5]]
    metrics = program_metrics(tmp_path, 1)
    send(tmp_path, 1, *messages[:2])
    metrics.poll()
    with send(tmp_path, 1, *messages).open("a") as file:
        file.write('["rows", [[1')
    for attempt in (2, 3):  # the supervisor of the second attempt is killed, too
        metrics = program_metrics(tmp_path, attempt)
        recover_rows(metrics._job, RunPaths(tmp_path), attempt, tmp_path)
        recovered = [row["step"] for row in iter_rows(tmp_path / "metrics.jsonl")]
        assert recovered == [1, 2, 3, 4, 5, 6]
        send(tmp_path, attempt, ["resumed", 5])
        metrics.finish()
        assert [row["step"] for row in iter_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
        if attempt == 2:
            send(tmp_path, 2, ["resumed", 5], ["rows", [[2.0, 6, "train", {"loss": 2.0}]]])


def test_a_row_behind_those_of_another_split_is_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An evaluation that counts epochs: without the order of steps, a resume would repeat rows."""
    metrics = program_metrics(tmp_path)
    rows = [
        [1.0, 10, "train", {"loss": 2.0}],
        [1.0, 1, "val", {"loss": 1.0}],
        [1.0, 11, "train", {"loss": 3.0}],
    ]
    send(tmp_path, 1, ["rows", rows])
    metrics.finish()
    splits = [(row["split"], row["step"]) for row in iter_rows(tmp_path / "metrics.jsonl")]
    assert splits == [("train", 10), ("train", 11)]
    told = capsys.readouterr().out
    assert told.count("val row of step 1 is dropped, since there are rows up to step 10") == 1


@pytest.mark.parametrize(
    ("looks_s", "is_hung"),
    [([1] * 119, False), ([1] * 121, True), ([60, 3600, 60], False), ([3600, *[1] * 121], True)],
)
def test_a_program_is_hung_after_the_minutes_of_the_file(
    looks_s: list[int], is_hung: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    job = Program.model_validate({
        "name": "prog",
        "program": {"command": ["python"]},
        "recovery": {"hang_after_min": 2},
    })  # fmt: skip
    (tmp_path / "attempts" / "1").mkdir(parents=True)
    rank = supervisor._Supervisor(RunPaths(tmp_path), 1, job, RankFacts(), StopFlag())
    now[0] += 10_000
    assert not rank._is_hung(), "it has not shown progress yet"
    send(tmp_path, 1)
    assert not rank._is_hung()
    found = []
    for pause_s in looks_s:  # a long one: the job was suspended
        now[0] += pause_s
        found.append(rank._is_hung())
    assert found == [False] * (len(looks_s) - 1) + [is_hung]


def test_the_reason_of_a_silent_program_is_its_exit_code(tmp_path: Path) -> None:
    (log := RunPaths(tmp_path).attempt(1).log(0)).parent.mkdir(parents=True)
    log.write_text("hpc-train: attempt 1: python train.py\n")
    job = Program.model_validate({"name": "prog", "program": {"command": ["python"]}})
    rank = supervisor._Supervisor(RunPaths(tmp_path), 1, job, RankFacts(), StopFlag())
    assert rank._error_text(3) == "the program ended with exit code 3: it printed nothing"


def test_metrics_may_have_the_names_of_messages(tmp_path: Path) -> None:
    """A run whose script logs them has not been asked to stop, and has not saved."""
    metrics = program_metrics(tmp_path, 1)
    values = {"stopping": 1.0, "saved": 2.0, "progress": 3.0, "total": 4.0, "finished": 5.0, "rows": 6.0}
    both = [[9.5, 3, "train", values], [9.5, 3, "val", {"loss": 0.5}]]
    file = send(tmp_path, 1, ["rows", both], ["progress", 2, 8])
    metrics.finish()
    rows = list(iter_rows(tmp_path / "metrics.jsonl"))
    assert [row | values for row in rows[:1]] == rows[:1] and (rows[0]["time"], rows[0]["step"]) == (9.5, 3)
    assert (metrics.step, metrics.total_steps, metrics.end_reason) == (3, 8, None)
    assert metrics.best == {"metric": "loss", "value": 0.5, "step": 3, "mode": "min"}
    assert not has_stopped(RunPaths(tmp_path).attempt(1))
    with file.open("a") as more:
        more.write('["stopping", 3, null]\n')
    assert has_stopped(RunPaths(tmp_path).attempt(1))


def test_loggers_receive_rows_once_and_final_ones_when_saved_or_completed(tmp_path: Path) -> None:
    def attempt(number: int, messages: list[Any], state: str) -> list[str]:
        metrics = program_metrics(tmp_path, number, logging={"csv": True})
        (tmp_path / "run.json").write_text(json.dumps({"id": "r-1", "wandb_id": "w"}))
        metrics.start_loggers()
        send(tmp_path, number, *messages)
        metrics.finish()
        metrics.close(state)
        return [line.split(",")[0] for line in (tmp_path / "csv" / "train.csv").read_text().splitlines()[1:]]

    def rows(*steps: int) -> list[Any]:
        return ["rows", [[0.0, step, "train", {"loss": 1.0}] for step in steps]]

    assert attempt(1, [rows(1, 2), ["saved", 2], rows(3)], "requeued") == ["1", "2"]
    assert attempt(2, [rows(3, 4)], "completed") == ["1", "2", "3", "4"]
    assert attempt(3, [], "completed") == ["1", "2", "3", "4"]


def test_sections_without_an_evaluation_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = program_metrics(tmp_path, 1, early_stopping={"metric": "loss", "mode": "min", "patience": 2})
    metrics.close("completed")
    assert "early_stopping had no effect: the script has not called session.metric" in capsys.readouterr().out
