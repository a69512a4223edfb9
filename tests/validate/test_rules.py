"""Rules beyond their messages, which are in ``messages.golden``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_train.experiment.config.fields import PositiveInt, Section
from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts import by_name
from hpc_train.experiment.data_facts.built_in import TASKS
from hpc_train.experiment.data_facts.facts import DataFacts
from hpc_train.experiment.validate import model_facts, part_rules
from hpc_train.experiment.validate.budget_rules import over_budget, over_share
from hpc_train.experiment.validate.loading import load
from hpc_train.experiment.validate.own_parts import missing_parts
from hpc_train.experiment.validate.rules import check_start, unused_without_queue
from hpc_train.experiment.validate.slurm_rules import MEMORY_SHARES, OWNED, SBATCH_KEYS
from hpc_train.experiment.validate.task_rules import remarks
from hpc_train.registry import parts
from hpc_train.training.strategies import model_facts as facts_of_models
from tests.config.files import GOOD, code_and_key, loaded_file, problems_of
from tests.run.runs import small_experiment
from tests.validate.messages import FILES, MODULES


@pytest.mark.parametrize("option", OWNED)
def test_slurm_options_of_the_launcher_are_refused(tmp_path: Path, option: str) -> None:
    for written in (option, option.replace("-", "_"), option[:-1]):
        (line,) = problems_of(tmp_path, GOOD, f"slurm.extra.{written}=x")
        assert code_and_key(line) == ("slurm.extra-option", f"slurm.extra.{written}")


def test_a_variable_in_a_path_is_answered_with_its_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_HERE", f"{tmp_path}/data")
    (line,) = problems_of(tmp_path, GOOD, "data.root=$DATA_HERE/a")
    assert line.endswith(f"$DATA_HERE is for a shell, and none reads it; write {tmp_path}/data/a")
    literal = tmp_path / "$DATA_HERE"
    literal.mkdir()
    assert not problems_of(tmp_path, GOOD, f"data.root={literal}")


@pytest.mark.parametrize("option", sorted(set(SBATCH_KEYS) - {"gres", *MEMORY_SHARES}))
def test_slurm_options_with_a_key_name_it(tmp_path: Path, option: str) -> None:
    (line,) = problems_of(tmp_path, GOOD, f"slurm.extra.{option}=1")
    assert f"write {SBATCH_KEYS[option]}" in line


def _file(model: str, parallel: str) -> str:
    return f"{GOOD.replace('acme.models:tiny', model)}parallel: {parallel}\n"


def test_a_model_is_not_asked_about_where_that_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(model_facts, "facts", lambda name, args: asked.append(name))
    for parallel in ("{strategy: fsdp}", "{strategy: tensor, tensor: 1}", "{strategy: tensor, tensor: 2}"):
        text = _file("timm/test_resnet", parallel)
        experiment = loaded_file(tmp_path, text=text).experiment
        assert check_start(experiment, 1 if "2" not in parallel else None) == []
    assert not asked


def test_degrees_of_a_plug_in_that_ignores_them_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = {"by_parameter": "acme:ByParameter"}
    monkeypatch.setattr(part_rules, "parts", lambda kind: parts(kind) | plugins)
    own = "parallel={strategy: by_parameter, args: {buckets: 3}}"
    assert problems_of(tmp_path, GOOD, own) == []
    (line,) = problems_of(tmp_path, GOOD, own, "parallel.shard=2")
    assert code_and_key(line) == ("parallel.degree", "parallel.shard") and "parallel.args" in line


def test_the_environment_may_have_the_tracking_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://user:hunter2@x.org")
    assert problems_of(tmp_path, GOOD, "logging.mlflow={}") == []


@pytest.mark.parametrize(("task", "metric"), [(task, each) for task in TASKS for each in TASKS[task].metrics])
def test_each_metric_of_a_built_in_task_has_a_direction(tmp_path: Path, task: str, metric: str) -> None:
    def number_of_remarks(mode: str) -> int:
        stopping = f"early_stopping={{metric: {metric.replace('*', 'car')}, mode: {mode}, patience: 3}}"
        loaded = loaded_file(tmp_path, f"task={task}", "data.name=acme:data", stopping)
        return len(list(remarks(loaded.experiment)))

    assert sorted(map(number_of_remarks, ("min", "max"))) == [0, 1]


@pytest.mark.parametrize(
    ("override", "is_local", "keys"),
    [
        ("slurm.spare_nodes=1", True, ["spare_nodes"]),
        ("slurm.spare_nodes=1", False, ["spare_nodes"]),
        ("slurm.nodes=2", True, []),
        ("recovery.standby=true", True, ["standby"]),
        ("recovery.standby=true", False, []),
        ("evaluation.as_job=true", True, ["as_job"]),
        ("evaluation.as_job=true", False, ["as_job"]),
    ],
)
def test_keys_without_effect_are_reported(
    tmp_path: Path, override: str, is_local: bool, keys: list[str]
) -> None:
    job = loaded_file(tmp_path, override).experiment
    assert [problem.path[-1] for problem in unused_without_queue(job, is_local=is_local)] == keys


@pytest.fixture
def _own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_parts.py").write_text(MODULES["own_parts.py"])
    monkeypatch.chdir(tmp_path)


def own_part_problems(root: Path | None = None) -> list[str]:
    Path("exp.yaml").write_text(FILES["own"])
    return [problem.code for problem in missing_parts([load(Path("exp.yaml")).experiment], lambda: root)]


@pytest.mark.usefixtures("_own_modules")
def test_ranks_import_from_the_root_of_the_work_tree_too(monkeypatch: pytest.MonkeyPatch) -> None:
    root, folder = Path.cwd(), Path.cwd() / "experiments"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert own_part_problems() == ["part.missing"] * 3
    assert own_part_problems(root=root) == []


@pytest.mark.usefixtures("_own_modules")
def test_what_python_has_no_description_of_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(module: str) -> None:
        raise ValueError(f"{module}.__spec__ is None")

    Path("own_parts.py").unlink()
    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    assert own_part_problems() == ["part.missing"] * 3


LACKING = Problem(("data", "root"), "has no stripes", "paint some")


class StripesArgs(Section):
    """The arguments of a plug-in's data set."""

    width: PositiveInt = 3


def test_the_facts_of_a_plug_in_say_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = DataFacts("images", "class", args=StripesArgs, layout=lambda root: LACKING)
    monkeypatch.setattr(by_name, "load_traits", lambda kind, name, default: facts)
    monkeypatch.setattr("hpc_train.registry._plug_ins", lambda kind: {"stripes": "acme.stripes:build"})
    (said,) = problems_of(tmp_path, GOOD, "data={name: stripes, args: {widht: 2}}")
    assert code_and_key(said) == ("data.arguments", "data.args.widht") and "'width'?" in said
    assert problems_of(tmp_path, GOOD, "data={name: stripes, args: {width: 2}}") == []
    assert by_name.misplaced(DataConfig(name="stripes", root=str(tmp_path))) == LACKING


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that the child process is asked about."""
    found: list[str] = []

    def facts(name: str, args: dict[str, Any], image_size: object = None) -> dict[str, Any]:
        found.append(f"{name} {args}")
        refusal = f"model.args: {name} takes no argument 'drop'; did you mean 'drop_rate'?"
        return {"args_refusal": refusal} if "drop" in args else {}

    monkeypatch.setattr(model_facts, "facts", facts)
    monkeypatch.setattr(model_facts, "known_names", lambda kind: ["resnet18"])
    model_facts._refusals.clear()
    return found


def test_a_sweep_of_an_argument_asks_once(asked: list[str]) -> None:
    for rate in (0.1, 0.2, 0.3):
        assert model_facts.args_refusal("timm/resnet18", {"drop_rate": rate}) is None
    assert len(asked) == 1


def test_the_child_names_an_argument_that_the_model_does_not_take() -> None:
    refusal = "model.args: timm/resnet18 takes no argument 'drop_ratee'; did you mean 'drop_rate'?"
    assert facts_of_models.answer("timm/resnet18", {"drop_ratee": 0.1}) == {"args_refusal": refusal}
    assert facts_of_models.answer("timm/resnet18", {"drop_rate": 0.1})["has_batchnorm"] is True


def test_large_numbers_of_gpu_hours_are_written_in_full() -> None:
    experiment = small_experiment(slurm={"max_gpu_hours": 1_500_000})
    predicted, one_attempt = over_budget(experiment, 2_345_678.9, None), over_budget(experiment, None, 2e6)
    assert predicted is not None and one_attempt is not None
    assert predicted.message.startswith("1,500,000 is less than the 2,345,679 GPU-hours that the runs")
    assert one_attempt.message.startswith("1,500,000 is less than the 2,000,000 GPU-hours that one")
    small = over_budget(small_experiment(slurm={"max_gpu_hours": 1.5}), 2.125, None)
    assert small is not None and small.message.startswith("1.5 is less than the 2.12 GPU-hours")


def test_a_run_that_needs_more_than_its_share_is_refused() -> None:
    experiment = small_experiment(slurm={"max_gpu_hours": 60})
    found = over_share(experiment, [1.25, 58.5], 2)
    assert found is not None
    assert found.message == (
        "60 is divided evenly among 2 runs; the longest is predicted to need 58.5 GPU-hours, "
        "and its share is 30"
    )
    assert found.remedy is not None and found.remedy.startswith("raise it to 117, or submit")
    assert over_share(experiment, [30.0, None], 2) is None
    assert over_share(experiment, [20.000000000001] * 3, 3) is None
    assert over_share(small_experiment(), [58.5, 1.0], 2) is None


VIT = "model={name: timm/vit}"
CIFAR = "data={name: torchvision/CIFAR10, root: x}"


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The questions about models; every model refuses the size."""
    asked: list[list[Any]] = []

    def answer(question: str | None) -> dict[str, Any]:
        if question is None:
            return {"timm": ["vit"], "torchvision": ["resnet18"], "datasets": ["CIFAR10", "Food101", "MNIST"]}
        asked.append(json.loads(question))
        return {"size_refusal": "Wrong height", "fitting_size": 224}

    monkeypatch.setattr(model_facts, "_answer", answer)
    return asked


@pytest.mark.parametrize(
    "overrides",
    [
        (VIT, "data={name: torchvision/Food101, root: x}"),  # images of many sizes
        (VIT, "data={name: imagefolder, root: x}"),
        (VIT, "data={name: 'my_data:build'}"),
        (CIFAR,),  # the user's own model
        (VIT, CIFAR, "task=resizes"),  # which may resize images
    ],
)
def test_nothing_is_asked_without_need(
    overrides: tuple[str, ...], tmp_path: Path, questions: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"tasks": {"resizes": "x:y"}}
    monkeypatch.setattr(
        "hpc_train.experiment.validate.part_rules.parts", lambda kind: parts(kind) | own.get(kind, {})
    )
    assert problems_of(tmp_path, GOOD, *overrides) == []
    assert questions == []


@pytest.mark.slow
def test_a_vit_is_asked_whether_it_takes_cifars_images(tmp_path: Path) -> None:
    model = "model.name=timm/vit_base_patch16_224"
    (line,) = problems_of(tmp_path, GOOD, model, CIFAR)
    assert code_and_key(line) == ("model.image-size", "data.image_size")
    assert line.endswith("; write 224, or model.args: {img_size: 32}")
    assert problems_of(tmp_path, GOOD, model, CIFAR, "model.args={img_size: 32}") == []
    assert problems_of(tmp_path, GOOD, model, CIFAR, "data.image_size=224") == []


@pytest.mark.slow
def test_images_of_a_size_that_the_model_cannot_take_are_refused(tmp_path: Path) -> None:
    model = "model.name=timm/test_vit"
    (line,) = problems_of(tmp_path, GOOD, model, "data.image_size=50")
    assert code_and_key(line) == ("model.image-size", "data.image_size") and line.endswith("; write 160")
    (line,) = problems_of(tmp_path, GOOD, model, "data={name: synthetic, args: {image_size: 50}}")
    assert code_and_key(line) == ("model.image-size", "data.args.image_size")
    assert problems_of(tmp_path, GOOD, model, "data.image_size=32") == []
