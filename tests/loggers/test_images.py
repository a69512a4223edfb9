"""Images of evaluations reach TensorBoard and wandb with their rows: once, and withdrawn with them."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from hpc_train.loggers.base import Logger
from hpc_train.loggers.metrics_writer import MetricsWriter
from hpc_train.loggers.process_logger import WandbLogger
from hpc_train.loggers.tensorboard import TensorboardLogger
from hpc_train.loggers.wandb import WandbMirror
from hpc_train.paths import RunPaths
from hpc_train.run.metric_rows import MetricsFile
from hpc_train.training.evaluation_outputs import EvaluationFiles, png
from tests.loggers.test_run_folder_loggers import killed
from tests.loggers.wandb_files import context, events_in, read_run, row
from tests.loggers.wandb_server import WandbServer


def image_of(step: int, attempt: int) -> bytes:
    return png(Image.new("RGB", (5, 4), (step, attempt, 0)))


def begin(run: RunPaths, step: int, logger: Logger) -> MetricsWriter:
    EvaluationFiles(run).withdraw(step)
    file = MetricsFile(run.metrics, step)
    writer = MetricsWriter(file, [logger], io.StringIO(), run.evaluation_images)
    writer.begin(step)
    return writer


def train(run: RunPaths, writer: MetricsWriter, attempt: int, steps: range) -> None:
    """Train and evaluate each step, with an image and a file that is none."""
    for step in steps:
        writer.write(row("train", step, attempt))
        files = {"predictions.png": image_of(step, attempt), "table.csv": b"1"}
        EvaluationFiles(run).write(step, files)
        writer.write(row("val", step, attempt))


def preempted_killed_and_rolled_back(run: RunPaths, make_logger: Any) -> dict[int, bytes]:
    """Return step → the image that counts."""

    def first() -> None:
        writer = begin(run, 0, make_logger(1))
        train(run, writer, 1, range(1, 4))
        writer.committed(2)
        train(run, writer, 1, range(4, 6))

    killed(first)
    writer = begin(run, 2, make_logger(2))
    train(run, writer, 2, range(3, 6))
    writer.committed(4)
    EvaluationFiles(run).withdraw(4)
    writer.go_back(4)
    train(run, writer, 3, range(5, 7))
    writer.committed(6)
    writer.state = "completed"
    writer.close()
    attempts = {1: 1, 2: 1, 3: 2, 4: 2, 5: 3, 6: 3}
    return {step: image_of(step, attempt) for step, attempt in attempts.items()}


def test_tensorboard_shows_each_image_once(run: RunPaths) -> None:
    expected = preempted_killed_and_rolled_back(run, lambda n: TensorboardLogger(context(run.folder, n)))
    images = events_in(run, "images")
    assert images.keys() == {"val/predictions"}
    shown = images["val/predictions"]
    assert [(each.step, each.encoded_image_string) for each in shown] == list(expected.items())
    assert {(each.width, each.height, each.wall_time) for each in shown} == {(5, 4, 1.0)}


def test_images_that_a_killed_attempt_did_not_flush_are_written_again(run: RunPaths) -> None:
    killed(lambda: train(run, begin(run, 0, TensorboardLogger(context(run.folder))), 1, range(1, 3)))
    begin(run, 2, TensorboardLogger(context(run.folder, 2))).close()
    assert [each.step for each in events_in(run, "images")["val/predictions"]] == [1, 2]


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0", b"GIF" * 20])
def test_a_damaged_image_is_omitted(content: bytes, run: RunPaths) -> None:
    EvaluationFiles(run).write(1, {"predictions.png": content})
    logger = TensorboardLogger(context(run.folder))
    logger.rows_committed(0)
    logger.log_images(row("val", 1), run.evaluation_images(1))
    logger.close("completed")
    assert events_in(run, "images") == {}


def test_images_are_the_plain_png_files_of_a_step(run: RunPaths) -> None:
    EvaluationFiles(run).write(3, {"b.png": b"", "a.png": b"", "table.csv": b""})
    folder = run.evaluation(3)
    (folder / "link.png").symlink_to(folder / "a.png")
    (folder / "folder.png").mkdir()
    assert run.evaluation_images(3) == {"a": folder / "a.png", "b": folder / "b.png"}
    assert run.evaluation_images(4) == {}


def test_wandb_is_handed_png_files_only(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens any format, and for EPS Pillow starts Ghostscript, whatever the name of the file."""
    files = {"eps.png": b"%!PS-Adobe-3.0 EPSF-3.0\n", "gif.png": b"GIF89a", "empty.png": b""}
    EvaluationFiles(run).write(1, {"right.png": image_of(1, 1), **files})
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Image=Path))
    mirror = object.__new__(WandbMirror)
    mirror._paths = run
    assert mirror._images(row("val", 1)) == {"val/right": run.evaluation(1) / "right.png"}
    assert mirror._images(row("train", 1)) == {}


def assert_images_are_with_their_rows(history: list[dict[str, Any]], expected: dict[int, bytes]) -> None:
    assert [line["step"] for line in history] == [step for step in expected for _ in ("train", "val")]
    shown = {line["step"]: line["val/predictions"] for line in history if "val/loss" in line}
    assert {step: each["sha256"] for step, each in shown.items()} == {
        step: hashlib.sha256(content).hexdigest() for step, content in expected.items()
    }
    assert all("val/predictions" not in line for line in history if "train/loss" in line)


@pytest.mark.slow
@pytest.mark.usefixtures("patient_close")
def test_wandb_has_images_of_final_rows_only(run: RunPaths, used_server: WandbServer) -> None:
    writer = begin(run, 0, WandbLogger(context(run.folder, 1, "online")))
    train(run, writer, 1, range(1, 4))
    writer.committed(2)
    writer.close()
    writer = begin(run, 2, WandbLogger(context(run.folder, 2, "online")))
    train(run, writer, 2, range(3, 5))
    (run.evaluation(4) / "predictions.png").write_bytes(b"damaged")
    writer.committed(4)
    writer.state = "completed"
    writer.close()
    (served,) = used_server.runs.values()
    assert served.received == len(served.history), "no row came twice"
    *history, last = served.history
    expected = {1: image_of(1, 1), 2: image_of(2, 1), 3: image_of(3, 2)}
    assert_images_are_with_their_rows(history[:-1], expected)
    assert last["val/loss"] == 2 and "val/predictions" not in last, "a damaged image does not keep its row"


@pytest.mark.slow
@pytest.mark.usefixtures("patient_close")
def test_each_offline_attempt_has_all_images_and_they_take_no_space(run: RunPaths) -> None:
    for attempt, first in ((1, 1), (2, 3)):
        writer = begin(run, first - 1, WandbLogger(context(run.folder, attempt, "offline")))
        train(run, writer, attempt, range(first, first + 2))
        writer.committed(first + 1)
        writer.close()
    newest = max(run.wandb.glob("offline-run-*/run-wid123.wandb"), key=lambda path: path.stat().st_mtime_ns)
    expected = {step: image_of(step, (step + 1) // 2) for step in range(1, 5)}
    history = json.loads(json.dumps(nested(read_run(newest)[1])))
    assert_images_are_with_their_rows(history, expected)
    for line in history[1::2]:
        copied = newest.parent / "files" / line["val/predictions"]["path"]
        assert copied.samefile(run.evaluation(line["step"]) / "predictions.png")


def nested(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return lines of history with the values of an image, which wandb's file has one by one, together."""
    found: list[dict[str, Any]] = []
    for line in history:
        found.append({})
        for key, value in line.items():
            name, _, part = key.partition(".")
            if part:
                found[-1].setdefault(name, {})[part] = value
            else:
                found[-1][name] = value
    return found
