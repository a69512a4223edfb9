"""Programs that misbehave end as docs/programs.md says: one sweep runs all that end by themselves."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cli.starting import own_code_place
from hpc_train.errors import ExitCode
from hpc_train.experiment.config.schema import Program
from hpc_train.paths import RunPaths
from hpc_train.rank.env import RankFacts
from hpc_train.rank.signals import StopFlag
from hpc_train.run import processes
from hpc_train.run.attempts import noted_signal, read_record
from hpc_train.run.metric_rows import iter_rows
from hpc_train.workloads import supervisor
from tests.end_to_end.runs import found_runs, hpc_train, last_step, start, status, wait_for
from tests.waiting import HANG_LIMIT_S
from tests.workloads.programs import SCRIPT, TORCHRUN_TEXT, program_metrics, write_program

MISBEHAVING = SCRIPT.with_name("misbehaving.py")
TEXT = r"""
name: prog
program:
  command: [python, train.py]
  kill_after_s: 0.5
  metrics: {regex: 'step (?P<step>\d+): loss (?P<loss>\S+)'}
recovery: {hang_after_min: 0.05}
sweep: {grid: {program.args.behave: BEHAVIORS}}
"""
RAISING = """
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("a bad batch on rank 1")
dist.barrier()
"""
#: Behavior → the run's state, the attempt's cause, the metric of each row, a part of the reason, of the log.
ENDS: Mapping[str, tuple[str, str, list[float | None], str, str]] = {
    "leaves servers": ("completed", "completed", [1], "", "has left 3 processes behind"),
    "becomes a daemon": ("completed", "completed", [1], "", "has left 1 process behind"),
    "forks": ("completed", "completed", [1, 2], "", ""),
    "writes NaN": ("completed", "completed", [1, None, None, None, None, 0.5], "", "loss inf"),
    "ends short": ("completed", "completed", [1], "exit code 0, but its last progress was step 7 of 20", ""),
    "changes its folder": ("completed", "completed", [1], "", ""),
    "deletes its folder": ("completed", "completed", [1], "", ""),
    "closes stdout": ("completed", "completed", [1], "", ""),
    "writes binary": ("completed", "completed", [1, 2], "", ""),
    "starts threads": ("completed", "completed", [1], "", ""),
    "leaves by _exit": ("completed", "completed", [1, 2], "", ""),
    "exits with 75": ("failed", "crash", [1], "exit code 75: the last line", ""),
    "exits with 76": ("failed", "crash", [1], "exit code 76: the last line", ""),
    "exits with 85": ("failed", "crash", [1], "exit code 85: the last line", ""),
    "exits with 137": ("failed", "crash", [1], "ended with exit code 137: killed by SIGKILL", ""),
    "crashes in C": ("failed", "crash", [1], "killed by SIGSEGV", "Fatal Python error: Segmentation fault"),
    "raises": ("failed", "crash", [1], "ValueError: a bad batch", "Traceback"),
    "hangs in C": ("failed", "hang", [1], "recovery.hang_after_min", "Fatal Python error: Aborted"),
}


def programs_of(folder: Path) -> list[int]:
    """Return the processes of the runs below ``folder``, by their environment or their working folder."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            facts = (process / "environ").read_bytes() + os.fsencode((process / "cwd").readlink())
        except OSError:
            continue
        if os.fsencode(folder) in facts and process.name != str(os.getpid()):
            pids.append(int(process.name))
    return pids


def begin(folder: Path, text: str, *words: str) -> subprocess.Popen[str]:
    """Submit the misbehaving script by a file of this text."""
    file = write_program(folder, text, MISBEHAVING)
    own = ("--local", "--devices", "1")
    return start("submit", file, *own, *words, cwd=file.parent, HPC_TRAIN_RUNS=str(folder / "runs"))


def by_behavior(folder: Path) -> dict[str, RunPaths]:
    return {
        json.loads(paths.resolved.read_text())["program"]["args"]["behave"]: paths
        for paths in found_runs(folder)
    }


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunPaths]:
    folder = tmp_path_factory.mktemp("misbehaving")
    process = begin(folder, TEXT.replace("BEHAVIORS", json.dumps(list(ENDS))), "--jobs", "4")
    _, err = process.communicate(timeout=HANG_LIMIT_S)
    assert process.returncode != 0, err
    return by_behavior(folder)


@pytest.mark.slow
@pytest.mark.parametrize("behavior", ENDS)
def test_it_ends_as_documented(ended: dict[str, RunPaths], behavior: str) -> None:
    state, cause, losses, reason, log = ENDS[behavior]
    paths = ended[behavior]
    record, written = read_record(paths.attempt(1)), paths.attempt(1).log(0).read_text(errors="replace")
    assert (status(paths)["state"], record and record.cause) == (state, cause), written
    assert reason in (status(paths)["reason"] or "")
    assert [row.get("loss") for row in iter_rows(paths.metrics)] == losses
    assert log in written


@pytest.mark.slow
def test_no_process_is_left(ended: dict[str, RunPaths]) -> None:
    assert programs_of(ended["raises"].folder.parent) == []


@pytest.mark.slow
def test_the_place_of_an_error_is_relative_to_the_folder_of_submit(ended: dict[str, RunPaths]) -> None:
    place = own_code_place(ended["raises"])
    assert place is not None
    name, _, line = place.partition(":")
    assert name == "train.py" and "a bad batch" in MISBEHAVING.read_text().splitlines()[int(line) - 1]


@pytest.mark.slow
def test_a_program_that_ignores_sigterm_is_killed_and_one_that_handles_it_is_continued(
    tmp_path: Path,
) -> None:
    behaviors = ["ignores SIGTERM", "handles SIGTERM"]
    text = TEXT.replace("BEHAVIORS", json.dumps(behaviors)).replace("0.05", "5")
    process = begin(tmp_path, text, "--jobs", "2")
    wait_for(lambda: sum(last_step(paths) == 2 for paths in found_runs(tmp_path)) == 2, "step 2 of both")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG_LIMIT_S)
    runs = by_behavior(tmp_path)
    assert [status(runs[behavior])["state"] for behavior in behaviors] == ["interrupted"] * 2
    logs = [runs[behavior].attempt(1).log(0).read_text() for behavior in behaviors]
    assert ["has not ended 0.5 s after SIGTERM" in log for log in logs] == [True, False]
    assert programs_of(tmp_path / "runs") == []


HANDLES = "signal.signal(signal.SIGTERM, lambda *_: os._exit(0));"


@pytest.mark.parametrize(
    ("program", "is_signalled", "signalled", "expected"),
    [
        (HANDLES, True, "together", ExitCode.TRY_AGAIN),
        (HANDLES, True, "later", ExitCode.TRY_AGAIN),
        ("", True, "later", ExitCode.TRY_AGAIN),
        (HANDLES, False, "never", ExitCode.DONE),
        ("", False, "together", ExitCode.DONE),
    ],
)
def test_a_program_that_ended_before_its_supervisor_saw_the_signal_of_both_is_continued(
    program: str,
    is_signalled: bool,
    signalled: str,
    expected: ExitCode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "attempts" / "1").mkdir(parents=True)
    job, flag = Program.model_validate({"name": "prog", "program": {"command": ["python"]}}), StopFlag()
    rank = supervisor._Supervisor(RunPaths(tmp_path), 1, job, RankFacts(), flag)
    monkeypatch.setattr(processes, "end_program_processes", lambda children: 0)  # pytest's others
    if signalled == "later":
        monkeypatch.setattr(time, "sleep", lambda seconds: flag.note(signal.SIGTERM))
    text = f"import os, signal; {program} print(flush=True); {'signal.pause()' if is_signalled else ''}"
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        if is_signalled:
            child.send_signal(signal.SIGTERM)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        if signalled == "together":
            flag.note(signal.SIGTERM)
        assert rank._judge(rank._wait(child)) == expected
    noted = noted_signal(RunPaths(tmp_path).attempt(1))
    assert (noted is not None) == (expected == ExitCode.TRY_AGAIN)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_processes_of_other_groups_too(tmp_path: Path) -> None:
    text = TEXT.replace("BEHAVIORS", "['starts a server']").replace("0.05", "5").replace("0.5", "60")
    process = begin(tmp_path, text)
    wait_for(lambda: any(last_step(paths) == 2 for paths in found_runs(tmp_path)), "step 2")
    process.send_signal(signal.SIGINT)
    (paths,) = found_runs(tmp_path)
    wait_for(lambda: noted_signal(paths.attempt(1)) is not None, "the signal")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG_LIMIT_S)
    wait_for(lambda: programs_of(tmp_path / "runs") == [], "the end of the server")


@pytest.mark.slow
def test_a_cancelled_program_in_a_pipe_of_the_shell_saves_first(tmp_path: Path) -> None:
    command = """[bash, -c, "python train.py --behave='saves when asked' | tee copy.txt"]"""
    text = TEXT.partition("sweep:")[0].replace("[python, train.py]", command).replace("0.5", "60")
    process = begin(tmp_path, text)
    wait_for(
        lambda: any(paths.attempt(1).session(0).exists() for paths in found_runs(tmp_path)), "the session"
    )
    (paths,) = found_runs(tmp_path)
    done = hpc_train("cancel", paths.folder)
    process.communicate(timeout=HANG_LIMIT_S)
    assert status(paths)["state"] == "cancelled", done.err
    assert [folder.name for folder in paths.checkpoints.glob("step-*")] == ["step-00000001"]
    assert "saved" in (paths.work / "copy.txt").read_text()


def searched(folder: Path, *blocks: bytes) -> list[Any]:
    """Return (step, loss) of the rows in an output that arrives in blocks."""
    metrics = program_metrics(folder, regex=r"step (?P<step>\d+): loss (?P<loss>\S+)(?: of (?P<total>\S+))?")

    class Output(io.RawIOBase):
        def __init__(self) -> None:
            self.left = list(blocks)

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            block = self.left.pop(0) if self.left else b""
            buffer[: len(block)] = block
            return len(block)

    metrics._copy(io.BufferedReader(Output(), 1 << 16))
    metrics.finish()
    return [(row["step"], row["loss"]) for row in iter_rows(folder / "metrics.jsonl")]


def test_lines_are_found_in_any_blocks_and_at_carriage_returns(tmp_path: Path) -> None:
    blocks = (b"step 1: lo", b"ss 1\nstep 2: loss 2\r", b"step 3: loss 3 of inf", b"\n\xff\xfestep 4: loss 4")
    assert searched(tmp_path, *blocks) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


def test_a_group_that_matches_text_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert searched(tmp_path, b"step 1: loss nan\nstep 2: loss 2, lr 1\nstep 3: loss 3,\n") == [(1, None)]
    printed = capsys.readouterr().out
    assert printed.count("program.metrics.regex: the group loss has matched '2,', which is not a number") == 1
    assert printed.count("is not a number") == 1


def test_a_line_without_end_takes_no_memory_and_hides_no_later_row(tmp_path: Path) -> None:
    blocks = [b"x" * (1 << 16)] * 400
    tracemalloc.start()
    rows = searched(tmp_path, b"step 1: loss 1\n", *blocks, b"step 9: loss 9\nstep 2: loss 2\n")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rows == [(1, 1.0), (2, 2.0)]
    assert peak < 4 << 20


@pytest.mark.slow
def test_the_error_of_a_rank_that_torchrun_started_is_the_reason(tmp_path: Path) -> None:
    file = write_program(tmp_path, TORCHRUN_TEXT.replace("per: node", "per: job"))
    (file.parent / "train.py").write_text(RAISING)
    done = hpc_train("submit", file, "--local", cwd=file.parent, HPC_TRAIN_RUNS=str(tmp_path / "runs"))
    (paths,) = found_runs(tmp_path)
    assert done.code == 1 and "ValueError: a bad batch on rank 1" in str(status(paths)["reason"]), done.err
    assert (own_code_place(paths) or "").startswith("train.py:")
    assert programs_of(tmp_path / "runs") == []
