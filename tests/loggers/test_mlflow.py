"""MLflow's history is ``metrics.jsonl``, whatever was preempted, killed or rolled back."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.experiment.config.schema import MlflowConfig
from hpc_train.loggers import mlflow, process_logger
from hpc_train.loggers.base import LoggerContext
from hpc_train.loggers.mlflow import TAG, MlflowMirror, _Run, flattened, metrics_of, named
from hpc_train.loggers.process_logger import MlflowLogger
from hpc_train.paths import RunPaths
from hpc_train.run.metric_rows import MetricsFile, iter_rows
from tests.loggers.attempts import preempted_killed_and_rolled_back
from tests.loggers.wandb_files import context, row

#: Makes a mirror of a store, by default of the fixture's.
Make = Callable[..., MlflowMirror]
History = dict[str, list[tuple[int, float, int]]]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, value in process_logger.MLFLOW_DEFAULTS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"file://{tmp_path}/mlruns"


def context_of(run: RunPaths, store: str | None, attempt: int = 1) -> LoggerContext:
    made = context(run.folder, attempt)
    logging = made.experiment.logging.model_copy(update={"mlflow": MlflowConfig(tracking_uri=store)})
    return replace(made, experiment=made.experiment.model_copy(update={"logging": logging}))


def client_of(store: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=store)


def runs_in(store: str) -> list[Any]:
    client = client_of(store)
    experiment = client.get_experiment_by_name("cifar")
    return [] if experiment is None else list(client.search_runs([experiment.experiment_id]))


def history_in(store: str, run_id: str) -> History:
    client = client_of(store)
    names = client.get_run(run_id).data.metrics
    return {
        name: [(each.step, each.value, each.timestamp) for each in client.get_metric_history(run_id, name)]
        for name in names
    }


def expected(run: RunPaths, up_to: int = 1000) -> History:
    found: History = {}
    for each in iter_rows(run.metrics):
        if each["step"] <= up_to:
            for name in each.keys() - {"time", "attempt", "split", "step", "epoch"}:
                point = each["step"], each[name], round(each["time"] * 1000)
                found.setdefault(f"{each['split']}/{name}", []).append(point)
    return found


def write(run: RunPaths, steps: range, kept: int = 0, factor: float = 1.0) -> None:
    """Resume at step ``kept``, then write the rows of ``steps``."""
    file = MetricsFile(run.metrics, kept)
    for step in steps:
        file.append(row("train", step) | {"loss": step * factor, "lr": 0.1})
        if step % 2 == 0:
            file.append(row("val", step) | {"loss": step * factor})
    file.close()


@pytest.fixture
def told() -> list[str]:
    """What mirrors warn of."""
    return []


@pytest.fixture
def mirror(run: RunPaths, store: str, told: list[str]) -> Iterator[Make]:
    """Return what makes the mirror of another process; the one before has died."""
    made: list[MlflowMirror] = []

    def release() -> None:
        for each in made:
            if each._lock is not None:
                each._lock.close()

    def make(uri: str | None = store) -> MlflowMirror:
        release()
        message = process_logger.mlflow_settings(context_of(run, uri), MlflowConfig(tracking_uri=uri))
        assert "hunter2" not in json.dumps(message)
        made.append(MlflowMirror(message, told.append))
        return made[-1]

    yield make
    release()


@pytest.mark.slow
@pytest.mark.usefixtures("patient_close")
def test_history_equals_all_rows(run: RunPaths, store: str, capfd: pytest.CaptureFixture[str]) -> None:
    def has_rows(count: int) -> bool:
        found = runs_in(store)
        return bool(found) and len(history_in(store, found[0].info.run_id).get("train/loss", ())) >= count

    preempted_killed_and_rolled_back(
        run, lambda number: MlflowLogger(context_of(run, store, number)), has_rows
    )
    (found,) = runs_in(store)
    assert history_in(store, found.info.run_id) == expected(run), "each row once, and no other"
    assert found.info.status == "FINISHED" and found.info.run_name == "run1"
    params = found.data.params
    assert params["optimization.optimizer.lr"] == "0.1" and params["model.name"] == "timm/resnet18"
    assert params["compile.enabled"] == "false" and params["data.root"] == "null"
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["between requests", "before the record"])
def test_what_was_sent_before_a_kill_is_not_sent_again(
    run: RunPaths, store: str, mirror: Make, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    write(run, range(1, 9))
    monkeypatch.setattr(mlflow, "_MAX_METRICS", 5)
    mirror().send(3)
    log, note, calls = _Run._log, _Run._note, [0]

    def log_once(self: _Run, metrics: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError("killed")
        log(self, metrics)

    def no_note(self: _Run, num_rows: int) -> None:
        raise OSError("killed")

    if failing == "between requests":
        monkeypatch.setattr(_Run, "_log", log_once)
    else:
        monkeypatch.setattr(_Run, "_note", no_note)
    broken = mirror()
    broken.send(6)
    monkeypatch.setattr(_Run, "_log", log)
    monkeypatch.setattr(_Run, "_note", note)
    (found,) = runs_in(store)
    sent = history_in(store, found.info.run_id)
    assert sent != expected(run, 3) and (sent != expected(run, 6)) == (failing == "between requests")
    broken.send(7)
    assert history_in(store, found.info.run_id) == expected(run, 7), "the same process tries again"
    mirror().send(8)
    assert history_in(store, found.info.run_id) == expected(run)


def test_a_run_without_its_record_is_found_by_its_tag(run: RunPaths, store: str, mirror: Make) -> None:
    write(run, range(1, 9))
    mirror().send(5)
    shutil.rmtree(run.mlflow)
    second = mirror()
    second.send(8)
    second.finish(None)
    (found,) = runs_in(store)
    assert found.data.tags[TAG] == "wid123" and found.info.status == "KILLED"
    assert history_in(store, found.info.run_id) == expected(run)


def test_withdrawn_rows_begin_another_run(run: RunPaths, store: str, mirror: Make) -> None:
    """A checkpoint that is found damaged takes the run behind rows that MLflow has."""
    write(run, range(1, 9))
    mirror().send(8)
    write(run, range(5, 11), kept=4, factor=3.0)
    second = mirror()
    second.send(10)
    write(run, range(9, 12), kept=8, factor=5.0)
    second.send(11)
    second.finish(0)
    found = {each.info.run_name: each.info for each in runs_in(store)}
    assert {name: info.status for name, info in found.items()} == {
        "run1": "KILLED", "run1-2": "KILLED", "run1-3": "FINISHED",
    }  # fmt: skip
    assert history_in(store, found["run1-3"].run_id) == expected(run)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of SQLAlchemy, which the process does not show
def test_a_database_is_a_store(run: RunPaths, tmp_path: Path, mirror: Make, told: list[str]) -> None:
    store = f"sqlite:///{tmp_path}/mlflow.db"
    write(run, range(1, 4))
    mirror(store).send(3)
    assert told == []
    (found,) = runs_in(store)
    assert history_in(store, found.info.run_id) == expected(run)


def test_a_failure_hides_credentials(mirror: Make, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:  # it refuses
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv(
            "MLFLOW_TRACKING_URI", f"http://someone:hunter2@127.0.0.1:{bound.getsockname()[1]}"
        )
        refused = mirror(None)
        for step in range(3):
            refused.send(step)
        assert refused._lock is None, "sync may send what this process can't"
        refused.finish(0)
    assert len(told) == 1 and "\n" not in told[0] and "hunter2" not in told[0]
    assert "127.0.0.1" in told[0]


def test_rows_and_parameters_have_names_that_mlflow_accepts() -> None:
    values = {"iou_a(b": 1, "flag": True, "text": "x", "none": None, "a/b": 2.5, "..": 1.0}
    assert metrics_of({"time": 1.2345, "split": "val", "step": 7, "epoch": 1, "attempt": 1} | values) == [
        ("val/iou_a_28_b", 1.0, 1234, 7),
        ("val/a_2f_b", 2.5, 1234, 7),
        ("val/_2e__2e_", 1.0, 1234, 7),
    ]
    assert named("val/", "x" * 250) != named("val/", "x" * 251)
    assert len(named("val/", "x" * 300)) == 250
    given = {"a": {"b": [1, 2], "c": None, "d": "text", "e": {}}, "f": False, "g": "x" * 7000}
    assert flattened(given) == {
        "a.b": "[1, 2]", "a.c": "null", "a.d": "text", "a.e": "{}", "f": "false", "g": "x" * 6000,
    }  # fmt: skip
