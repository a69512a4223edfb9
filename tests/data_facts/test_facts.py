"""A plug-in's facts are read by validation and planning, which know no data set by its name."""

from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path

import pytest
import torch
import torchvision
from PIL import Image

import hpc_train
from hpc_train import registry
from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts import built_in
from hpc_train.experiment.data_facts.built_in import DATA_SETS, TASKS
from hpc_train.experiment.data_facts.by_name import data_facts, task_facts, task_misfit, training_samples
from hpc_train.experiment.data_facts.facts import DataFacts, TaskFacts
from hpc_train.training.datasets.building import build_source
from tests.config.files import GOOD, problems_of

MASKS = DataFacts("images", "mask", needs_root=True, num_samples=lambda data: 10 * data.args["scenes"])
NUMBERS = DataFacts("features", "number")
OUTLINING = TaskFacts(("images",), ("mask",))
SCANS = DataFacts("images", "mask", example="")
NOT_FACTS = {"modality": "images"}


@pytest.fixture
def plugged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        "datasets": {"masks": "MASKS", "numbers": "NUMBERS", "scans": "SCANS", "bad": "NOT_FACTS"},
        "tasks": {"outlining": "OUTLINING", "bad": "MASKS", "cant_be_imported": "ABSENT"},
    }

    def exported(kind: str) -> dict[str, str]:
        return {name: f"{__name__}:{attr}" for name, attr in rows.get(kind, {}).items()}

    parts = registry.parts
    monkeypatch.setattr(registry, "_traits", exported)
    monkeypatch.setattr(registry, "parts", lambda kind: parts(kind) | exported(kind))
    monkeypatch.setattr("hpc_train.experiment.validate.part_rules.parts", registry.parts)


@pytest.mark.usefixtures("plugged_in")
def test_a_row_names_a_new_data_set_and_a_new_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row is all that the package has of them outside of their modules."""
    stamps = DataFacts("images", "mask", implementation="json:loads", num_samples=lambda data: 8)
    monkeypatch.setitem(DATA_SETS, "stamps", stamps)
    monkeypatch.setitem(TASKS, "tracing", TaskFacts(("images",), ("mask",), "json:dumps"))
    assert (registry.load("datasets", "stamps"), registry.load("tasks", "tracing")) == (
        json.loads,
        json.dumps,
    )
    assert training_samples(DataConfig(name="stamps")) == 8
    assert task_misfit("tracing", "stamps", data_facts("stamps")) is None
    assert task_misfit("tracing", "text", data_facts("text")) is not None


def test_what_has_no_row_may_be_anything() -> None:
    for name in ("my_data:build", "unheard-of", "unheard-of/part", "text.module:build"):
        assert data_facts(name) == DataFacts()
    assert task_facts("unheard-of") == TaskFacts()
    assert task_misfit("unheard-of", "x", MASKS) is None
    assert task_misfit("classification", "x", DataFacts()) is None


@pytest.mark.usefixtures("plugged_in")
def test_a_plug_ins_samples_are_counted_without_its_data() -> None:
    assert training_samples(DataConfig(name="masks/city", args={"scenes": 7})) == 70
    assert training_samples(DataConfig(name="numbers")) is None


@pytest.mark.parametrize("name", TASKS)
def test_tasks_with_predictions_name_the_formats_of_their_files(name: str) -> None:
    module, _, attribute = TASKS[name].implementation.partition(":")
    task = getattr(importlib.import_module(module), attribute)
    assert bool(TASKS[name].prediction_formats) == hasattr(task, "predictions")


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("digits", {}),
        ("digits", {"channels": 3}),
        ("synthetic", {}),
        ("synthetic", {"channels": 2}),
        ("imagefolder", {}),
        ("imagefolder", {"channels": 1}),
    ],
)
def test_size_and_channels_are_those_of_the_data(name: str, args: dict[str, int], tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        Image.new("RGB", (5, 7)).save(tmp_path / part / "a" / "1.png")
    root = str(tmp_path) if data_facts(name).needs_root else None
    data = DataConfig(name=name, root=root, args=args)
    source = build_source(data)
    images = source.train.batch(torch.tensor([0]))[0][0] if root is None else None
    assert data_facts(name).channels(data) == source.info.channels
    size = data_facts(name).image_size(data)
    assert size is None if images is None else images.shape[1:] == (size, size)


@pytest.mark.parametrize("name", sorted(built_in.TORCHVISION))
def test_torchvision_has_the_data_sets_of_the_table(name: str) -> None:
    assert name in torchvision.datasets.__all__


@pytest.mark.usefixtures("plugged_in")
@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (("data={name: masks/city}", "task=outlining"), "data.root: is missing, and masks/city needs it"),
        (("data={name: masks, root: x}",), "masks has images (target: mask); write segmentation, or"),
        (("task=outlining",), "write classification, or data.name: segmentation_folder or scans"),
        (("data={name: numbers}",), "numbers has features (target: number); write regression, or data.name"),
    ],
)
def test_a_file_is_checked_by_a_plug_ins_row(overrides: tuple[str, ...], part: str, tmp_path: Path) -> None:
    (line,) = problems_of(tmp_path, GOOD, *overrides)
    assert part in line
    assert problems_of(tmp_path, GOOD, "data={name: masks, root: x}", "task=outlining") == []


@pytest.mark.usefixtures("plugged_in")
def test_a_row_of_another_type_is_refused() -> None:
    with pytest.raises(BadFileError, match=r"data\.name: the facts of 'bad' are a dict; .*DataFacts"):
        data_facts("bad")
    with pytest.raises(BadFileError, match=r"task: the facts of 'bad' are a DataFacts; .*TaskFacts"):
        task_facts("bad")


@pytest.mark.parametrize("pattern", [
    "experiment/validate/*.py", "experiment/plan/*.py", "experiment/topology/*.py", "training/*.py",
    "workloads/*.py", "cli/*.py", "run/**/*.py", "report/**/*.py",
])  # fmt: skip
def test_no_data_set_is_known_by_name_elsewhere(pattern: str) -> None:
    names = DATA_SETS.keys() - {"text", "tokens", "torchvision"}  # words of their own
    files = list(Path(hpc_train.__file__).parent.glob(pattern))
    assert files
    for path in files:
        literals = {
            node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)
        }
        assert not names & literals, path
