"""``init``: the file it writes is valid for every task, says what to change, and replaces nothing."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from hpc_train.cli.first_file import quoted, with_job_section
from hpc_train.cli.init import EXAMPLES
from hpc_train.errors import UsageError
from hpc_train.experiment.data_facts.built_in import TASKS
from hpc_train.experiment.data_facts.task_starts import STARTS
from hpc_train.experiment.validate.loading import load
from hpc_train.launchers.base import JobSection
from tests.cli.commands import hpc_train, stderr_of, succeeded
from tests.cli.files import write_images
from tests.datasets.coco import write_coco
from tests.datasets.sources.masks import write_folder


def written(*arguments: str | Path, name: str = "exp.yaml") -> str:
    """Write a file for this machine in the current folder; return its text."""
    succeeded("init", "--local", "-y", "-o", name, *arguments)
    return Path(name).read_text(encoding="utf-8")


def images(root: Path) -> Path:
    """Write a folder with real images."""
    content = io.BytesIO()
    Image.new("RGB", (8, 8)).save(content, "png")
    for path in write_images(root).rglob("*.png"):
        path.write_bytes(content.getvalue())
    return root


def data_of(task: str, root: Path) -> Path:
    """Make a few samples for a task; return their root."""
    match task:
        case "classification":
            return images(root)
        case "segmentation":
            return write_folder(root, train=4, val=2)
        case "detection":
            return write_coco(root)
        case "regression":
            images(root)
            for split in ("train", "val"):
                names = [path.relative_to(root) for path in sorted((root / split).rglob("*.png"))]
                rows = "".join(f"{path},{number / 2}\n" for number, path in enumerate(names))
                (root / f"{split}.csv").write_text(f"path,target\n{rows}")
            return root
        case "causal_lm":
            root.mkdir()
            (root / "text.txt").write_text("To be, or not to be, that is the question. " * 400)
            return root / "text.txt"
    raise ValueError(task)


def test_every_task_has_a_start() -> None:
    assert {start.task for start in STARTS} == TASKS.keys()


@pytest.mark.parametrize("task", TASKS)
def test_the_file_is_valid_and_fits_small_data(task: str, tmp_path: Path) -> None:
    root = data_of(task, tmp_path / "data")
    text = written("--task", task, "--root", str(root))
    done = hpc_train("validate", "exp.yaml")
    assert done.code == 0, done.err + text
    assert hpc_train("plan", "exp.yaml", "--local").code == 0
    assert yaml.safe_load(text)["data"]["root"] == str(root)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_the_file_trains(task: str, tmp_path: Path) -> None:
    """As far as ``prepare`` goes: it reads samples, and runs model and task on two of them."""
    from hpc_train.training import prepare

    written("--task", task, "--root", str(data_of(task, tmp_path / "data")))
    sizes = [] if task == "causal_lm" else ["data.image_size=96"]  # for speed
    assert prepare.main(["exp.yaml", *sizes]) == 0


def test_without_data_the_lines_to_change_are_named() -> None:
    done = hpc_train("init", "--local", "-y", "--task", "segmentation", "-o", "new.yaml")
    lines = Path("new.yaml").read_text().splitlines()
    to_change = [number for number, line in enumerate(lines, 1) if "# CHANGE" in line]
    assert f"change lines {', '.join(map(str, to_change))}" in done.err
    assert [lines[number - 1].split(":")[0].strip() for number in to_change] == ["root", "args"]
    assert "train/images/" in lines[to_change[0] - 1]
    rooted = hpc_train("init", "--local", "-y", "--task", "segmentation", "--root", "d", "-o", "rooted.yaml")
    assert f"change line {to_change[1]}\n" in rooted.err
    assert "new.yaml: written for this machine" in done.err and "`hpc-train validate new.yaml`" in done.err


def test_digits_need_nothing_and_keys_are_explained() -> None:
    text = written()
    assert "# Samples per forward pass of one rank" in text and "CHANGE:" not in text
    assert load(Path("exp.yaml")).experiment.data.name == "digits"


def test_each_gpu_has_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    written()
    experiment = load(Path("exp.yaml")).experiment
    assert experiment.micro_batches == 8 and experiment.precision == "bf16"
    written("--gpus", "0", name="cpu.yaml")
    assert load(Path("cpu.yaml")).experiment.precision == "fp32"


def test_choices_are_written() -> None:
    written("--data", "torchvision/CIFAR10", "--root", "a b/c#d", "--model", "timm/vit_tiny_patch16_224")
    experiment = load(Path("exp.yaml"), check_names=False).experiment
    assert (experiment.data.name, experiment.data.root) == ("torchvision/CIFAR10", "a b/c#d")
    assert experiment.data.image_size is None, "these images have a size"
    assert experiment.model.name == "timm/vit_tiny_patch16_224"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    Path("exp.yaml").write_text("mine")
    done = hpc_train("init", "--local")
    assert (done.code, Path("exp.yaml").read_text()) == (2, "mine") and "not overwritten" in done.err
    Path("link.yaml").symlink_to(tmp_path / "nowhere")
    assert hpc_train("init", "--local", "-o", "link.yaml").code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--task", "segmentaton"], "did you mean segmentation?"),
        (["--from", "digit"], "did you mean digits?"),
        (["--from", "digits", "--task", "detection"], "--task: the recipe has its own"),
        (["--root", "a\nb: c"], "control character"),
        (["--from", "digits", "--root", "x"], "--root: the recipe has no data.root"),
    ],
)
def test_what_cannot_be_written(arguments: list[str], words: str) -> None:
    assert words in stderr_of(2, "init", "--local", *arguments)
    assert not Path("exp.yaml").exists()


@pytest.mark.parametrize("recipe", sorted(path.stem for path in EXAMPLES.glob("*.yaml")))
def test_a_recipe_is_valid_where_it_is_written(recipe: str) -> None:
    text = written("--from", recipe)
    assert load(Path("exp.yaml"), check_names=False).experiment.name
    modules = {path.name for path in Path("examples").glob("*.py")}
    assert modules == {path.name for path in EXAMPLES.glob("*.py") if f"examples.{path.stem}:" in text}
    assert f"examples/{recipe}.yaml" not in text


def test_a_recipe_gets_the_data_and_the_section_of_the_cluster() -> None:
    text = written("--from", "cifar10-images", "--root", "/data/c")
    assert yaml.safe_load(text)["data"]["root"] == "/data/c"
    job = JobSection({"partition": "gpu", "nodes": 1}, notes=["partition gpu: 2 nodes"])
    text = with_job_section(written("--from", "digits", name="digits.yaml"), job)
    assert yaml.safe_load(text)["slurm"] == job.values and "# partition gpu: 2 nodes" in text
    assert with_job_section(text, job) == text, "its own section is kept"


def test_recipes_are_listed() -> None:
    done = hpc_train("init", "--from", "list")
    assert done.code == 0 and not Path("exp.yaml").exists()
    titles = dict(line.split(maxsplit=1) for line in done.out.splitlines())
    assert titles["cifar10-vit"] == "A small ViT on CIFAR-10 from scratch"
    assert titles["llama-fsdp-tensor"].endswith("optimizer state (FSDP)")


def test_on_a_terminal_it_asks_for_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("hpc_train.cli.init._is_terminal", lambda: True)
    monkeypatch.setattr(sys, "stdin", Terminal("nonsense\ndetection\n\n/data/boxes\n\n"))
    assert "write one of classification" in stderr_of(0, "init", "--local")
    content = yaml.safe_load(Path("exp.yaml").read_text())
    data = content["data"]
    assert (content["task"], data["name"], data["root"]) == ("detection", "coco", "/data/boxes")


def test_input_that_ends_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_train.cli.init._is_terminal", lambda: True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("detection\n"))
    assert hpc_train("init", "--local").code == 130 and not Path("exp.yaml").exists()


@pytest.mark.parametrize(
    "value",
    [
        "plain", "1e-3", "on", "a b", "a: b", "#x", "null", "- a", "'", '"', "é", 1, 0.001, True, [1, "a"],
        {"a": 1},
    ],
)  # fmt: skip
def test_values_are_read_back_as_they_are(value: Any) -> None:
    from hpc_train.experiment.config.marked_yaml import read_value

    assert read_value(quoted(value)) == (value, [])


def test_control_characters_are_refused() -> None:
    with pytest.raises(UsageError, match="control character"):
        quoted("\x1b[31m")
