from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.cli.logs import FOLLOWED_LINES, _tail_offset
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import claim_attempt
from hpc_train.run.files import write_json
from hpc_train.run.find import find_runs
from hpc_train.run.run_status import RunStatus, write_status
from tests.cli.commands import hpc_train, python, start
from tests.cli.launchers import COMPLETING
from tests.launchers.slurm.programs import put_programs_first
from tests.launchers.slurm.queued import begin, queued_run
from tests.run.runs import change_record, small_run
from tests.waiting import HANG_LIMIT_S


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """Two attempts of two ranks; the second one runs, in this process."""
    paths = small_run(tmp_path / "runs")
    for attempt in (1, 2):
        claim_attempt(paths)
        for rank in (0, 1):
            paths.attempt(attempt).log(rank).write_text(f"attempt {attempt} rank {rank}\n")
    write_status(paths, RunStatus(state="running", attempt=2))
    return paths


def _logs(*arguments: str) -> tuple[int, str, str]:
    done = python("-m", "hpc_train", "logs", *arguments)
    return done.code, done.out, done.err


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        ([], 0, "attempt 2 rank 0\n", ""),
        (["--rank", "1", "--attempt", "1"], 0, "attempt 1 rank 1\n", ""),
        (["-f", "--attempt", "1"], 0, "attempt 1 rank 0\n", ""),
        (["--rank", "7"], 2, "", "attempt 2 has rank-0.log, rank-1.log"),
        (["--attempt", "7"], 2, "", "there is no attempt 7; the run has attempts 1 to 2"),
    ],
)
def test_the_newest_attempts_rank_0_is_shown_unless_others_are_chosen(
    run: RunPaths, arguments: list[str], code: int, out: str, err: str
) -> None:
    done = _logs("abc", *arguments)
    assert done[:2] == (code, out)
    assert err in done[2] if err else done[2] == ""


def test_before_an_attempt_has_output_the_last_ones_end_is_shown(run: RunPaths) -> None:
    for rank in (0, 1):
        run.attempt(2).log(rank).unlink()
    run.attempt(1).log(0).write_text("".join(f"line {number}\n" for number in range(50)))
    change_record(run.attempt(1), reason="preempted at step 4")
    code, out, err = _logs("abc")
    assert (code, out.splitlines()) == (0, [f"line {number}" for number in range(50 - FOLLOWED_LINES, 50)])
    assert err.splitlines()[1:] == ["attempt 1: preempted at step 4", "attempt 2: starting"]
    run.attempt(2).log(0).touch()
    assert _logs("abc", "-n", "1")[1] == "line 49\n", "an empty log"
    assert json.loads(_logs("abc", "--json")[1])["attempt"] == 1
    run.attempt(2).log(0).write_text("first\n")
    assert _logs("abc") == (0, "first\n", "")


def test_a_queued_attempt_is_announced_with_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ("12", "PENDING", "Resources", "1", "N/A", "N/A", "0", "", "small", "x", "\n")
    put_programs_first(tmp_path, monkeypatch).put("squeue", f"printf '%s' '{chr(31).join(job)}'")
    paths = queued_run(tmp_path / "runs", "12")
    begin(paths, "11", cause="crash", reason="rank 0: killed", end="2026-01-01T00:00:00+00:00")
    paths.attempt(1).log(0).write_text("the end\n")
    write_status(paths, RunStatus("pending", 4, 10, attempt=1))
    code, out, err = _logs("abc")
    assert (code, out) == (0, "the end\n")
    assert err.splitlines()[-2:] == ["attempt 1: rank 0: killed", "attempt 2: starting (waits: Resources)"]


def test_an_earlier_attempt_that_trained_is_named(run: RunPaths) -> None:
    began = {"first_step": "2026-01-01T00:00:00.000Z"}
    change_record(run.attempt(1), events=began, saved_step=239)
    assert _logs("abc")[2] == ""
    change_record(run.attempt(2), end="2026-01-01T00:00:01Z")
    assert _logs("abc")[2] == "attempt 2 of 2; attempt 1 trained and saved step 239: --attempt 1\n"


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("count", [1, 3, 8000, 9000])
def test_a_tail_is_found_from_the_end(tmp_path: Path, count: int, end: str) -> None:
    lines = [f"line {number} of the log" for number in range(9000)]
    (tmp_path / "log").write_text("\n".join(lines) + end)
    with (tmp_path / "log").open() as file:
        file.seek(_tail_offset(tmp_path / "log", count))
        assert file.read().splitlines() == lines[-count:]


def test_a_tail_does_not_read_the_whole_file(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        file.truncate(1 << 40)  # a hole: reading all of it would take an hour
        file.seek(0, 2)
        file.write(b"\nlast\n")
    assert _tail_offset(tmp_path / "log", 1) == (1 << 40) + 1


@pytest.mark.slow
def test_following_begins_with_the_tail(run: RunPaths) -> None:
    lines = [f"line {number}\n" for number in range(50)]
    run.attempt(2).log(0).write_text("".join(lines))
    write_status(run, RunStatus(state="completed", attempt=2))
    code, out, err = _logs("abc", "-f")
    assert (code, out) == (0, "".join(lines[-FOLLOWED_LINES:]))
    assert "the last 20 lines; --all prints all of them" in err
    assert _logs("abc", "-f", "-n", "3")[1] == "".join(lines[-3:])
    for everything in (("-f", "--all"), ("-f", "-n", "0"), ()):
        assert _logs("abc", *everything) == (0, "".join(lines), "")


def test_of_several_runs_each_is_told_apart_and_the_last_can_be_chosen(file: Path) -> None:
    hpc_train("submit", file, "--local", "--launcher", COMPLETING, "sweep.grid={seed: [1, 2, 3]}")
    runs = find_runs([])
    by_seed = {json.loads(paths.run.read_text())["values"]["seed"]: paths for paths in runs}
    refused = hpc_train("logs", "tiny")
    assert refused.code == 2 and "tiny: matches 3 runs" in refused.err and "--last" in refused.err
    listed = [line.split() for line in refused.err.splitlines()[1:]]
    expected = [[paths.folder.name, "completed", f"seed={seed}"] for seed, paths in by_seed.items()]
    assert sorted(listed) == sorted(expected)
    refused = hpc_train("export", "tiny", "-o", "w.safetensors")
    assert refused.code == 2 and "export takes one; write its id:" in refused.err
    assert sorted(line.split() for line in refused.err.splitlines()[1:]) == sorted(expected)
    for seed, paths in by_seed.items():
        paths.attempt(1).log(0).write_text(f"seed {seed}\n")
    change_record(by_seed[2].attempt(1), start="2999-01-01T00:00:00+00:00")
    done = _logs("tiny", "--last")
    assert (done[0], done[1]) == (0, "seed 2\n") and "seed=2" in done[2]


@pytest.mark.slow
def test_following_ends_with_the_run_and_misses_nothing(run: RunPaths) -> None:
    process = start("logs", "-f", "abc")
    assert process.stdout is not None
    assert process.stdout.readline() == "attempt 2 rank 0\n"
    with run.attempt(2).log(0).open("a") as log:
        log.write("more\n")
    assert process.stdout.readline() == "more\n"
    with run.attempt(2).log(0).open("a") as log:
        log.write("the end, \xe9")
    write_status(run, RunStatus(state="completed", attempt=2))
    out, _ = process.communicate(timeout=HANG_LIMIT_S)
    assert (process.returncode, out) == (0, "the end, \xe9")


@pytest.fixture
def queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """Job 12 of the run has ended; its batch script said something, and no rank started."""
    programs = put_programs_first(tmp_path, monkeypatch)
    programs.put("squeue", "exit 0")
    programs.put("sacct", "printf '12\\x1fFAILED\\x1f2026-11-21T06:05:06\\x1f1:0\\x1fn1\\x1fsmall\\n'")
    paths = queued_run(tmp_path / "runs", "12")
    submission = paths.siblings.submission("t1")
    submission.folder.mkdir(parents=True)
    write_json(submission.record, {"job_id": "12", "state": "released"})
    (submission.folder / "12_0_log.out").write_text("module: nothing is called cuda/99\n")
    return paths


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no rank of job 12 has started; its batch script printed:"),
        pytest.param(["-f"], "failed: job 12 ended before any rank started", marks=pytest.mark.slow),
    ],
)
def test_where_no_rank_started_the_batch_scripts_output_is_shown(
    queued: RunPaths, options: list[str], message: str
) -> None:
    code, out, err = _logs("abc", *options)
    assert (code, out) == (0, "module: nothing is called cuda/99\n")
    assert message in err
    begin(queued, "11")
    queued.attempt(1).log(0).write_text("earlier\n")
    assert _logs("abc", "--attempt", "1")[1] == "earlier\n"


@pytest.mark.slow
def test_a_run_that_ended_before_it_printed_anything_says_why(tmp_path: Path) -> None:
    paths = small_run(tmp_path / "runs")
    assert "abc: has not started yet; `logs -f` waits for it" in hpc_train("logs", "abc").err
    write_status(paths, RunStatus("failed", reason="n1 can't write"))
    done = hpc_train("logs", "abc")
    assert (done.code, done.err) == (2, "abc: failed before it started: n1 can't write\n")


@pytest.mark.slow
def test_following_continues_through_a_requeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = put_programs_first(tmp_path, monkeypatch)
    programs.put("squeue", "exit 1")  # says no: the folder's word counts
    paths = queued_run(tmp_path / "runs", "12")
    begin(paths, "12")
    paths.attempt(1).log(0).write_text("one\n")
    write_status(paths, RunStatus(state="requeued", attempt=1, reason="preempted at step 4"))
    process = start("logs", "-f", "abc")
    assert process.stdout is not None
    assert process.stdout.readline() == "one\n"
    begin(paths, "12", restart=1)
    paths.attempt(2).log(0).write_text("two\n")
    assert process.stdout.readline() == "two\n"
    write_status(paths, RunStatus(state="completed", attempt=2))
    _, err = process.communicate(timeout=HANG_LIMIT_S)
    assert process.returncode == 0
    assert "attempt 2 starts" in err
