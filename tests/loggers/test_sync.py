"""``sync`` sends what was logged offline: each final row once, however often and whenever it is called."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hpc_train.loggers import process_logger
from hpc_train.loggers.base import LoggerContext
from hpc_train.loggers.process_logger import WandbLogger
from hpc_train.loggers.sending import locked
from hpc_train.loggers.tensorboard import EventFiles
from hpc_train.loggers.wandb import _named
from hpc_train.paths import RunPaths, runs_root
from hpc_train.run import frozen_experiment
from hpc_train.run.files import read_json
from hpc_train.run.metric_rows import iter_rows
from hpc_train.run.run_status import RunStatus, write_status
from hpc_train.training.evaluation_outputs import png
from tests.cli.commands import REPOSITORY, hpc_train, succeeded
from tests.loggers.attempts import Attempt
from tests.loggers.test_mlflow import client_of, history_in
from tests.loggers.test_mlflow import expected as expected_in_mlflow
from tests.loggers.wandb_files import plain, row, scalars, without_images
from tests.loggers.wandb_server import WandbServer
from tests.run.runs import small_run
from tests.run.test_checkpoints import begin_attempt, write_checkpoint
from tests.waiting import HANG_LIMIT_S

_LOGGING = {"logging": {"wandb": {"project": "p", "mode": "offline"}}}
_TO_ALL = ("--to", "wandb", "--to", "mlflow", "--to", "tensorboard")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in process_logger.MLFLOW_DEFAULTS.items():
        monkeypatch.setenv(name, value)
    uri = f"file://{tmp_path}/mlruns"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


@pytest.fixture
def run() -> RunPaths:
    return small_run(runs_root(), **_LOGGING)


def wandb_id(run: RunPaths) -> str:
    return str((read_json(run.run) or {})["wandb_id"])


def saved(run: RunPaths, step: int, attempt: int, state: str = "requeued") -> None:
    write_checkpoint(run, step, attempt)
    write_status(run, RunStatus(state, step, 10, attempt=attempt))


def append(run: RunPaths, *rows: dict[str, Any]) -> None:
    with run.metrics.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_rows(run: RunPaths, *steps: int) -> None:
    append(run, *(row("train", step) for step in steps))


def steps_sent(server: WandbServer, run: RunPaths) -> list[int]:
    return [line["step"] for line in server.runs[wandb_id(run)].history]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_offline_runs(
    run: RunPaths, used_server: WandbServer, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(number: int) -> WandbLogger:
        begin_attempt(run, number, [path.folder.name for path in run.checkpoint_folders()])
        experiment = frozen_experiment.read(run)
        return WandbLogger(LoggerContext(experiment, run, "abc", number, wandb_id(run), {}))

    first = Attempt(run, 1, 0, make)
    first.train(*range(1, 9), saved=5)
    saved(run, 5, 1)
    first.end("failed")  # preempted
    second = Attempt(run, 2, 5, make)
    second.train(6, 7, 8, 9)
    second.roll_back(5)
    second.train(6, 7, 8, saved=6)
    saved(run, 6, 2)
    assert hpc_train("sync", "abc").code == 0, "while the second attempt runs"
    assert steps_sent(used_server, run) == [1, 2, 2, 3, 4, 4, 5, 6, 6]
    second.kill(kills_process=True)
    third = Attempt(run, 3, 6, make)
    third.train(*range(7, 11), saved=10)
    run.evaluation(10).mkdir(parents=True)
    (run.evaluation(10) / "predictions.png").write_bytes(png(Image.new("RGB", (5, 4), "red")))
    saved(run, 10, 3, "completed")
    third.end("completed")

    done = succeeded("sync", "abc", *_TO_ALL, "--json")
    synced = {each["to"]: each for each in json.loads(done.out)["synced"]}
    assert {to: each["rows_sent"] for to, each in synced.items()} == {
        "wandb": 6, "mlflow": 15, "tensorboard": 15,
    }  # fmt: skip
    assert all((each["rows"], each["step"], each["error"]) == (15, 10, None) for each in synced.values())
    (served,) = used_server.runs.values()
    assert without_images(plain(served.history)) == [_named(each) for each in iter_rows(run.metrics)]
    assert served.received == 15 and served.history[-1]["val/predictions"]["_type"] == "image-file"
    assert served.name == "abc" and not run.wandb_sync.exists()
    mlflow_run = str(synced["mlflow"]["target"])
    assert history_in(store, mlflow_run) == expected_in_mlflow(run)
    assert client_of(store).get_run(mlflow_run).info.status == "FINISHED"
    assert scalars(run) == in_events(run)

    before = contents(run.folder), contents(Path(store.removeprefix("file://")))
    asked: list[str] = []
    monkeypatch.setattr(used_server, "answer", lambda path, body: asked.append(path) or {})
    assert hpc_train("sync", "abc", *_TO_ALL).out.count("nothing new, 15 rows up to step 10") == 3
    assert (contents(run.folder), contents(Path(store.removeprefix("file://")))) == before

    assert not asked, "the record is enough"

    monkeypatch.delattr(used_server, "answer")
    run.synced.unlink()
    assert hpc_train("sync", "abc", *_TO_ALL).out.count("nothing new, 15 rows up to step 10") == 3
    assert served.received == 15 and history_in(store, mlflow_run) == expected_in_mlflow(run)
    assert scalars(run) == in_events(run)


def in_events(run: RunPaths) -> dict[str, list[tuple[int, Any]]]:
    """Return what TensorBoard should show of the run."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for each in iter_rows(run.metrics):
        found.setdefault(f"{each['split']}/loss", []).append((each["step"], pytest.approx(each["loss"])))
    return found


@pytest.mark.slow
def test_a_killed_sync_is_repeated(run: RunPaths, used_server: WandbServer) -> None:
    write_rows(run, *range(1, 3001))
    saved(run, 3000, 0, "failed")
    has_lines, may_answer = threading.Event(), threading.Event()

    def hold_back() -> None:
        served = used_server.runs[wandb_id(run)]
        if served.history:  # the rest does not arrive
            del served.history[1000:]
            served.summary["_step"] = 999
            has_lines.set()
            may_answer.wait(HANG_LIMIT_S)

    used_server.on_lines = hold_back
    command = [sys.executable, "-m", "hpc_train", "sync", "abc"]
    killed = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
    assert has_lines.wait(HANG_LIMIT_S)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    lock = locked(run.wandb_lock, limit_s=HANG_LIMIT_S, must=True)  # its process ends with it
    assert lock is not None
    lock.close()
    used_server.on_lines = lambda: None
    may_answer.set()
    assert not run.synced.exists() and len(used_server.runs[wandb_id(run)].history) == 1000
    succeeded("sync", "abc")
    assert steps_sent(used_server, run) == list(range(1, 3001)) and len(used_server.runs) == 1


@pytest.mark.slow
def test_event_files_elsewhere_follow_rows_that_are_withdrawn(run: RunPaths, tmp_path: Path) -> None:
    write_rows(run, 1, 2, 3, 4)
    saved(run, 3, 0)
    to = ("--to", "tensorboard", "-o", tmp_path / "events")
    (tmp_path / "events").mkdir()
    killed = EventFiles(run, tmp_path / "events" / "abc")
    assert killed.begin(2) == 2
    killed.close()
    assert "3 rows sent" in hpc_train("sync", "abc", *to).out
    sent = {tag: points[:3] for tag, points in in_events(run).items()}
    assert scalars(run, tmp_path / "events" / "abc") == sent, "what a killed sync has written is there once"
    run.metrics.write_text("")
    write_rows(run, 1, 2)
    append(run, *(row("train", step, 2) | {"loss": 9.0} for step in (3, 4)))
    saved(run, 4, 0, "completed")
    assert "4 rows sent" in hpc_train("sync", "abc", *to).out
    assert scalars(run, tmp_path / "events" / "abc") == in_events(run)


@pytest.mark.slow
def test_a_repeated_evaluation_at_a_sent_step_reaches_event_files(run: RunPaths, tmp_path: Path) -> None:
    to = ("--to", "tensorboard", "-o", tmp_path / "events")
    write_rows(run, 1, 2)
    saved(run, 2, 0)
    assert "2 rows sent" in hpc_train("sync", "abc", *to).out
    append(run, row("val", 2, 1))
    write_rows(run, 3)
    saved(run, 3, 0)
    hpc_train("sync", "abc", *to)
    write_rows(run, 4)
    saved(run, 4, 0)
    assert "1 row sent, now 5 rows" in hpc_train("sync", "abc", *to).out
    assert "val/loss" in in_events(run)
    assert scalars(run, tmp_path / "events" / "abc") == in_events(run)


@pytest.mark.slow
def test_a_run_that_another_process_sends_is_left_to_it(run: RunPaths, used_server: WandbServer) -> None:
    write_rows(run, 1)
    saved(run, 1, 0)
    lock = locked(run.wandb_lock)
    done = hpc_train("sync", "abc")
    assert done.code == 75 and "another process sends the run's rows" in done.err and not used_server.runs
    assert lock is not None
    lock.close()


def test_unsendable_rows_are_refused_before_sending(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    plain_run = small_run(runs_root() / "..", name="other")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    for words, told in (
        (("abc", "--to", "comet"), "--to: 'comet' is not one of wandb, mlflow, tensorboard"),
        (("abc", "--to", "mlflow"), "set MLFLOW_TRACKING_URI"),
        (("abc", "-o", "there"), "add --to tensorboard"),
        (("abc", "--to", "wandb", "--project", "a/b"), "--project: 'a/b' is not a valid"),
        ((plain_run.folder,), "logging: names none of wandb, mlflow and tensorboard"),
    ):
        done = hpc_train("sync", *words)
        assert done.code == 2 and told in done.err, done
    monkeypatch.delenv("WANDB_API_KEY")
    assert "no API key is set; run `wandb login`" in hpc_train("sync", "abc").err


def test_rows_after_the_newest_checkpoint_are_held(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    write_rows(run, 1, 2)
    assert "no rows yet that a checkpoint has made final" in hpc_train("sync", "abc").out


@pytest.mark.slow
@pytest.mark.parametrize("to", ["tensorboard", "mlflow"])
def test_damaged_lines_are_named_and_the_others_sent(run: RunPaths, store: str, to: str) -> None:
    write_rows(run, 1)
    without_time = {name: value for name, value in row("train", 2).items() if name != "time"}
    damaged = [without_time, row("train", 3) | {"time": "noon"}, row("train", 4) | {"loss": 10**400}]
    append(run, *damaged)
    with run.metrics.open("a") as file:
        file.write('{"split": "train", "step": 5, "lo\n')
    write_rows(run, 6)
    saved(run, 6, 0)
    done = succeeded("sync", "abc", "--to", to)
    notes = [line for line in done.err.splitlines() if "metrics.jsonl" in line]
    assert [line.partition("metrics.jsonl: ")[2] for line in notes] == [
        "line 2 has no valid time and is not sent",
        "line 3 has no valid time and is not sent",
        "line 5 is not a row and is not sent",
    ]
    if to == "tensorboard":
        assert [step for step, _ in scalars(run)["train/loss"]] == [1, 6]
    else:
        (sent,) = client_of(store).search_runs(
            [client_of(store).get_experiment_by_name("small").experiment_id]
        )
        assert [step for step, *_ in history_in(store, sent.info.run_id)["train/loss"]] == [1, 6]
