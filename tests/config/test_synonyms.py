"""What people write who come from other tools, and what they are told to write here."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.config.json_schema import Node, cached_schema
from hpc_train.config.keys import all_keys, as_mapping, known_keys, members, node_at, split_key
from hpc_train.config.marked_yaml import read_value
from hpc_train.config.remedies import in_flow
from hpc_train.config.schema import Experiment
from hpc_train.config.sweep_sections import Distribution
from hpc_train.config.synonyms import _ALSO_CALLED, ADVICE, KEYS, KEYS_WITHIN, SBATCH_KEYS, VALUES
from tests.config.files import GOOD, problems_of


@pytest.mark.parametrize(
    ("line", "key", "remedy"),
    [
        ("gpus: 2", "gpus", "write slurm.gpus_per_node"),
        ("slurm: {gres: 'gpu:2'}", "slurm.gres", "write slurm.gpus_per_node and slurm.gpu_type"),
        ("slurm: {ntasks: 2}", "slurm.ntasks", "write slurm.ranks_per_node"),
        ("slurm: {time: 2h}", "slurm.time", "write slurm.time_limit"),
        ("batch_size: 64", "batch_size", "write optimization.global_batch_size"),
        ("num_epochs: 3", "num_epochs", "write optimization.epochs"),
        ("max-epochs: 3", "max-epochs", "write optimization.epochs"),
        ("learning_rate: 3", "learning_rate", "write optimization.optimizer.lr"),
        ("weight_decay: 3", "weight_decay", "did you mean optimization.optimizer.weight_decay?"),
        ("num_workers: 3", "num_workers", "write data.workers"),
        ("nodes: 2", "nodes", "write slurm.nodes"),
        ("mixed_precision: bf16", "mixed_precision", "write precision"),
        ("devices: 2", "devices", "--local --devices N"),
        ("gradient_accumulation_steps: 2", "gradient_accumulation_steps", "global_batch_size / (micro_b"),
        ("evaluation: {interval: 2}", "evaluation.interval", "write evaluation.every_steps"),
        ("checkpoint: {interval: 2}", "checkpoint.interval", "write checkpoint.every_steps"),
        ("tensorboard: true", "tensorboard", "write logging.tensorboard"),
        ("experiment_name: a", "experiment_name", "write name"),
    ],
)
def test_names_of_other_tools_lead_to_the_key(tmp_path: Path, line: str, key: str, remedy: str) -> None:
    (said,) = problems_of(tmp_path, f"{GOOD}{line}\n")
    assert f": {key}: unknown key; " in said and remedy in said


@pytest.mark.parametrize(
    ("old", "new", "key", "remedy"),
    [
        ("  name: acme.models:tiny", "  model_name: acme.models:tiny", "model.model_name", "model.name"),
        ("  global_batch_size", "  batch_size", "optimization.batch_size", "optimization.global_batch_size"),
        (
            "  epochs: 3\n  global_batch_size: 64",
            "  global_batch_size: 64\nepochs: 3",
            "epochs",
            "mean optimization.epochs?",
        ),
        ("name: sgd", "type: sgd", "optimization.optimizer.type", "write optimization.optimizer.name"),
        (
            "lr: 0.1",
            "learning_rate: 0.1",
            "optimization.optimizer.learning_rate",
            "optimization.optimizer.lr",
        ),
    ],
)
def test_the_key_that_was_meant_is_not_reported_as_missing_too(
    tmp_path: Path, old: str, new: str, key: str, remedy: str
) -> None:
    text = GOOD.replace(old, new)
    if new.endswith("epochs: 3"):
        moved = "  epochs: 3\n"
        text = GOOD.replace(moved, "") + "epochs: 3\n"
    (said,) = problems_of(tmp_path, text)
    assert f": {key}: " in said and remedy in said


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("match: [fc.*], lr: 0.1", "lr_factor"),
        ("match: [fc.*], lr_mult: 0.1", "lr_factor"),
        ("match: [fc.*], wd: 0", "weight_decay"),
        ("params: [fc.*]", "match"),
    ],
)
def test_a_group_of_parameters_has_its_own_names(tmp_path: Path, given: str, meant: str) -> None:
    groups = f"groups: [{{match: [a]}}, {{{given}}}]"
    (said,) = problems_of(tmp_path, GOOD.replace("lr: 0.1", f"lr: 0.1, {groups}"))
    assert said.endswith(f": unknown key; write optimization.optimizer.groups[1].{meant}")


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("device=gpu", "write cuda"),
        ("device='cuda:0'", "write cuda"),
        ("precision=bfloat16", "write bf16"),
        ("precision=16", "write fp16"),
        ("precision=16-mixed", "write fp16"),
        ("checkpoint.every_min=10min", "write 10 (every_min is in minutes)"),
        ("checkpoint.every_min=1.5 h", "write 90 (every_min is in minutes)"),
        ("recovery.hang_after_min=90s", "write 1.5 (hang_after_min is in minutes)"),
        ("slurm.mem_gb=64G", "write 64 (mem_gb is in GB)"),
        ("slurm.mem_gb=64GiB", "write 64 (mem_gb is in GB)"),
        ("slurm.mem_gb=1500M", "write 2 (mem_gb is in GB)"),
        ("slurm.signal_lead_s=2min", "write 120 (signal_lead_s is in seconds)"),
        ("slurm.time_limit=10 minutes", "write 10min"),
        ("slurm.time_limit=1.5h", "write 90min"),
        ("data.augment.hflip=50%", "write 0.5"),
        ("model=resnet50", "write {name: timm/resnet50}"),
        ("model=gpt", "write {name: gpt}"),
        ("data=cifar10", "write {name: cifar10}"),
        ("data.name=cifar10", "write torchvision/CIFAR10"),
        ("optimization.optimizer=adam", "write {name: adam, lr: …}"),
        ("parallel=fsdp", "write {strategy: fsdp}"),
        ("optimization.ema=true", "write {decay: …}"),
        ("checkpoint=true", "write {} for the defaults"),
        (
            "checkpoint=5",
            "write its keys, like {key: value}, where key is one of every_min, every_steps, keep, best",
        ),
        ("model.args=5", "write its keys, like {key: value}"),
        ("logging=wandb", "write {wandb: {project: …}}"),
        ("logging=[csv, wandb]", "write {csv: true, wandb: {project: …}}"),
        ("evaluation=every_epoch", "write {every_epochs: 1}"),
        ("data.augment=[hflip]", "write {hflip: 0.5}"),
        ("data.augment=policy", "write {policy: …}"),
        ("data.augment.hflip=2", "write a number like 0.5"),
        ("data.augment.crop_padding=-1", "write a number like 1"),
        ("data.eval_crop=2", "write a number like 1.0"),
        ("optimization.optimizer.momentum=1", "write a number like 0.9"),
        ("optimization.label_smoothing=1", "write a number like 0.1"),
        ("optimization.mixup=-1", "write a number like 0.1"),
        ("data.augment.random_scale=0.5", "write a list: [a, b]"),
        ("sweep.grid={optimization.optimizer.lr: 0.1}", "write a list: [0.1]"),
        (
            "sweep.grid={optimization: {optimizer: {lr: [0.1, 0.2], name: [sgd]}}}",
            "write the whole key path: optimization.optimizer.lr: [0.1, 0.2]",
        ),
        ("sweep.grid={optimization: {}}", "write the whole key path: optimization: [a, b]"),
        (
            "sweep.random={count: 3, parameters: {optimization.optimizer.lr: [0.1, 0.2]}}",
            "write {choice: [0.1, 0.2]} or {uniform: [0.1, 0.2]}",
        ),
        (
            "sweep.random={count: 3, parameters: {optimization.optimizer.name: [sgd, adamw]}}",
            "write {choice: [sgd, adamw]}",
        ),
        (
            "sweep.search={trials: 3, metric: loss, mode: min, parameters: {optimization.optimizer.lr: ab}}",
            "write its keys, like {key: value}, where key is one of " + ", ".join(Distribution.model_fields),
        ),
    ],
)
def test_values_of_other_tools_and_units_lead_to_the_value(
    tmp_path: Path, override: str, remedy: str
) -> None:
    (said,) = problems_of(tmp_path, GOOD, override)
    assert said.endswith(f"; {remedy}")


def test_no_name_of_other_tools_has_two_keys() -> None:
    names = [name for words in _ALSO_CALLED.values() for name in words.split()]
    assert len(names) == len(set(names))


def test_a_section_is_judged_by_its_other_keys_where_one_is_wrong(tmp_path: Path) -> None:
    """The second parameter's mistake is found although the first one's is no distribution."""
    parameters = "{optimization.optimizer.lr: [0.1, 0.2], seed: {int: [2, 1]}}"
    said = problems_of(tmp_path, GOOD, f"sweep.random={{count: 3, parameters: {parameters}}}")
    assert len(said) == 2 and "is empty: 2 is above 1" in said[1]


def test_every_target_is_a_key_and_no_name_is_a_key_where_it_is_read() -> None:
    keys = {".".join(map(str, path)) for path in all_keys()}
    free = ("model.args.", "optimization.optimizer.args.")
    for key in KEYS.values():
        assert all(each in keys or each.startswith(free) for each in key.split(" and ")), key
    for section, called in KEYS_WITHIN.items():
        for name, key in called.items():
            assert key in known_keys(section)
            assert name not in known_keys(section)
    assert not KEYS.keys() & ADVICE.keys()


def test_every_option_of_sbatch_with_a_key_leads_to_it() -> None:
    assert {option.replace("-", "_"): key for option, key in SBATCH_KEYS.items()}.items() <= KEYS.items()


def test_every_value_that_is_recommended_is_one() -> None:
    for key, called in VALUES.items():
        for member in members(node_at(split_key(key)) or {}):
            assert "enum" not in member or set(called.values()) <= set(member["enum"])


def _required(path: tuple[str, ...], node: Node) -> list[tuple[str, ...]]:
    mapping = as_mapping(node) or {}
    below = mapping.get("properties", {})
    found = [(*path, key) for key in mapping.get("required", [])]
    return found + [each for key, child in below.items() for each in _required((*path, key), child)]


def test_every_required_key_has_an_example_that_is_valid() -> None:
    required = _required((), cached_schema())
    assert ("optimization", "optimizer", "lr") in required
    assert [path for path in required if "examples" not in (node_at(path) or {})] == []
    Experiment.model_validate(
        {
            key: cached_schema()["properties"][key]["examples"][0]
            for (key,) in (path for path in required if len(path) == 1)
        }
    )


def test_a_missing_section_is_shown_as_it_is_written() -> None:
    assert in_flow({"a": {"b": 1}, "c": [1]}) == "{a: {b: 1}, c: [1]}"


@pytest.mark.parametrize(
    "text", ["*.bias", "!head", "a, b", "{x", "a: b", "a #b", "1", "true", "", " ", "'", '"', "\x1b"]
)
def test_text_of_the_file_is_shown_in_quotes_where_yaml_needs_them(text: str) -> None:
    shown = in_flow({text: [text, None, True]})
    assert '"' in shown
    assert read_value(shown) == ({text: [text, None, True]}, [])


@pytest.mark.parametrize("text", ["layer1.*", "timm/resnet18", "acme.models:tiny", "90min", "a b"])
def test_text_of_the_file_that_needs_no_quotes_is_shown_without(text: str) -> None:
    assert in_flow([text]) == f"[{text}]"
