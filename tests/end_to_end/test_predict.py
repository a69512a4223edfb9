"""``predict`` writes a line per sample, in their order, the same on any number of ranks."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.paths import RunPaths
from hpc_train.training.datasets.building import build_source
from tests.end_to_end.runs import hpc_train, rows
from tests.end_to_end.test_evaluate import EVALUATED
from tests.quiet import QuietRuns

pytestmark = pytest.mark.slow


@pytest.fixture
def run(quiet_runs: QuietRuns) -> RunPaths:
    return quiet_runs.of(*EVALUATED)


def predicted(run: RunPaths, target: Path, *options: str | Path) -> list[dict[str, Any]]:
    done = hpc_train("predict", run.folder, "-o", target, *options)
    assert done.code == 0, done.err
    lines = target.read_text().splitlines()
    return list(csv.DictReader(lines)) if target.suffix == ".csv" else [*map(json.loads, lines)]


def test_predictions_are_those_of_the_evaluation(run: RunPaths, tmp_path: Path) -> None:
    source = build_source(DataConfig(name="digits"))
    assert source.val is not None
    targets = source.val.batch(torch.arange(len(source.val)))[1].tolist()  # type: ignore[union-attr]
    found = predicted(run, tmp_path / "all.jsonl", "--last", "--devices", "3")
    assert [row["index"] for row in found] == list(range(len(targets)))
    names = source.info.class_names or range(10)
    hits = sum(row["class"] == names[target] for row, target in zip(found, targets, strict=True))
    *_, last = rows(run, "val")
    assert hits / len(targets) == last["accuracy"]
    for row in found:
        assert row["top"][0] == {"class": row["class"], "probability": row["probability"]}
        assert [each["probability"] for each in row["top"]] == sorted(
            (each["probability"] for each in row["top"]), reverse=True
        )
    averaged = predicted(run, tmp_path / "ema.csv", "--last", "--devices", "1", "--ema")
    hits = sum(row["class"] == str(names[target]) for row, target in zip(averaged, targets, strict=True))
    assert hits / len(targets) == last["ema_accuracy"]


def test_samples_of_an_own_data_set_have_no_file(run: RunPaths, tmp_path: Path) -> None:
    own = 'data={name: "tests.end_to_end.parts:waiting", args: {held: 0, path: nowhere}}'
    found = predicted(run, tmp_path / "own.jsonl", own, "--devices", "1")
    assert [row["index"] for row in found] == list(range(len(found))) and "file" not in found[0]


def test_images_of_a_folder_are_predicted_in_the_order_of_their_names(run: RunPaths, tmp_path: Path) -> None:
    source = build_source(DataConfig(name="digits"))
    assert source.val is not None
    images = source.val.batch(torch.arange(14))[0]  # type: ignore[union-attr]
    folder = tmp_path / "images"
    (folder / "b").mkdir(parents=True)
    for number, image in enumerate(images):
        Image.fromarray(image[0].numpy()).save(folder / ("b" if number > 9 else ".") / f"{number:02}.png")
    expected = predicted(run, tmp_path / "all.jsonl")[:14]
    found = predicted(run, tmp_path / "images.jsonl", "--data", folder, "--devices", "2")
    files = [row.pop("file") for row in found]
    assert files == sorted(map(str, folder.rglob("*.png")), key=lambda name: name.rpartition("/")[2])
    assert found == expected


def test_files_of_a_folder_that_are_not_read_are_reported_once(run: RunPaths, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for name, mode in (("0.png", "L"), ("1.png", "LA"), (".2.png", "L")):
        Image.new(mode, (32, 32)).save(folder / name)
    (folder / "notes.txt").touch()
    done = hpc_train("predict", run.folder, "-o", tmp_path / "all.jsonl", "--data", folder, "--devices", "2")
    assert done.code == 0, done.err
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) == 2
    assert done.err.count("--data: not read: 1 hidden files or folders (first: .2.png)") == 1, done.err
    assert done.err.count("--data: not read: 1 files with other extensions (.txt 1; first: notes.txt)") == 1
    assert done.err.count("data: 1 of 2 inspected images have transparent pixels") == 1
