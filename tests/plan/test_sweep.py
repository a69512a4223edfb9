"""The runs of a sweep and their ids; ``validate/messages.golden`` has the runs that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_train.errors import BadFileError
from hpc_train.experiment.plan.planning import make_plan
from hpc_train.experiment.plan.sweep import Variant, changes_identity, content_hash, describe, expand, run_id
from tests.plan.files import loaded, plan_on_slurm


def test_the_last_key_of_the_grid_varies_fastest(tmp_path: Path) -> None:
    variants = expand(loaded(tmp_path, "sweep.grid={optimization.optimizer.lr: [0.1, 0.2], seed: [3, 4]}"))
    assert [list(variant.values.values()) for variant in variants] == [[0.1, 3], [0.1, 4], [0.2, 3], [0.2, 4]]
    pairs = [(v.experiment.optimization.optimizer.lr, v.experiment.seed) for v in variants]
    assert pairs == [(0.1, 3), (0.1, 4), (0.2, 3), (0.2, 4)]


def test_a_file_without_a_grid_is_one_run(tmp_path: Path) -> None:
    file = loaded(tmp_path)
    (only,) = expand(file)
    assert only.values == {}
    assert only.id == run_id(file.experiment) == content_hash(file.experiment)[:10]
    assert len(content_hash(file.experiment)) == 64


def test_a_run_of_a_sweep_is_the_run_of_a_file_that_says_its_values(tmp_path: Path) -> None:
    (_, second) = expand(loaded(tmp_path, "sweep.grid={seed: [0, 5]}"))
    assert second.id == run_id(loaded(tmp_path, "seed=5").experiment)
    assert second.experiment.sweep.grid == {}


SCALING = """\
slurm: {ranks_per_node: 2}
sweep:
  grid: {slurm.nodes: [1, 2, "1-2"]}
"""


def test_the_same_experiment_on_more_nodes_is_a_run_of_its_own(tmp_path: Path) -> None:
    variants = expand(loaded(tmp_path, more=SCALING))
    nodes = [variant.experiment.slurm and variant.experiment.slurm.nodes for variant in variants]
    assert nodes == [1, 2, "1-2"]
    assert len({variant.id for variant in variants}) == 3
    again = expand(loaded(tmp_path, "sweep.grid={slurm.nodes: [2, 1]}", more=SCALING))
    assert [variant.id for variant in again] == [variants[1].id, variants[0].id]


def test_the_order_of_scaled_keys_does_not_change_ids(tmp_path: Path) -> None:
    keys = ("slurm.nodes: [2]", "slurm.ranks_per_node: [1]")
    one, other = (
        expand(loaded(tmp_path, f"sweep.grid={{{', '.join(order)}}}")) for order in (keys, keys[::-1])
    )
    assert [variant.id for variant in one] == [variant.id for variant in other]


def test_values_are_described_as_in_an_experiment_file() -> None:
    values = {
        "compile": True,
        "optimization.clip_grad_norm": None,
        "data.name": "digits",
        "model.args.x": [1, "é"],
    }
    words = 'compile=true optimization.clip_grad_norm=null data.name=digits model.args.x=[1, "é"]'
    assert describe(values) == words


_LR, _MOMENTUM = "optimization.optimizer.lr", "optimization.optimizer.momentum"
_NAME = "optimization.optimizer.name"


def _expand(folder: Path, sweep: str, *overrides: str) -> list[Variant]:
    return expand(loaded(folder, *overrides, more=f"sweep:\n{sweep}"))


def _values(folder: Path, sweep: str) -> list[dict[str, Any]]:
    return [variant.values for variant in _expand(folder, sweep)]


def _ids(folder: Path, sweep: str) -> list[str]:
    return [variant.id for variant in _expand(folder, sweep)]


def test_a_list_has_a_run_per_entry_and_an_empty_entry_is_the_file_itself(tmp_path: Path) -> None:
    variants = _expand(tmp_path, f"  list: [{{}}, {{seed: 1, {_LR}: 0.2}}, {{seed: 2}}]\n")
    assert [variant.values for variant in variants] == [{}, {"seed": 1, _LR: 0.2}, {"seed": 2}]
    assert [variant.experiment.seed for variant in variants] == [0, 1, 2]
    assert variants[0].id == expand(loaded(tmp_path))[0].id
    assert not variants[0].experiment.sweep.list


def test_a_list_is_combined_with_a_grid_whose_keys_vary_faster(tmp_path: Path) -> None:
    values = _values(tmp_path, f"  list: [{{{_LR}: 0.1}}, {{{_LR}: 0.2}}]\n  grid: {{seed: [0, 1]}}\n")
    assert values == [{_LR: lr, "seed": seed} for lr in (0.1, 0.2) for seed in (0, 1)]


def test_a_run_of_a_list_keeps_its_id_when_another_entry_varies_the_job(tmp_path: Path) -> None:
    slurm = ("slurm={ranks_per_node: 2}",)
    (alone,) = _expand(tmp_path, "  list: [{seed: 1}]\n", *slurm)
    first, second = _expand(tmp_path, "  list: [{seed: 1}, {seed: 1, slurm.nodes: 2}]\n", *slurm)
    assert first.id == alone.id != second.id


RANDOM = """\
  random:
    count: 12
    seed: 7
    parameters:
      optimization.optimizer.lr: {log_uniform: [1e-4, 1e-1]}
      optimization.optimizer.weight_decay: {uniform: [0, 0.1], step: 0.02}
      optimization.schedule.warmup_steps: {int: [0, 6], step: 3}
      optimization.optimizer.name: {choice: [sgd, adamw]}
"""


def test_draws_are_within_their_distributions_and_short(tmp_path: Path) -> None:
    drawn = _values(tmp_path, RANDOM.replace("count: 12", "count: 100"))
    assert len(drawn) == 100
    rates = [values[_LR] for values in drawn]
    assert all(1e-4 <= rate <= 1e-1 and float(f"{rate:.6g}") == rate for rate in rates)
    assert 20 < sum(rate < 1e-3 for rate in rates) < 50, "a third of the range, in the logarithm"
    assert {values["optimization.optimizer.weight_decay"] for values in drawn} == {
        0.0, 0.02, 0.04, 0.06, 0.08, 0.1
    }  # fmt: skip
    assert {values["optimization.schedule.warmup_steps"] for values in drawn} == {0, 3, 6}
    assert {values[_NAME] for values in drawn} == {"sgd", "adamw"}


def test_whole_numbers_of_a_logarithmic_range_reach_both_bounds(tmp_path: Path) -> None:
    sweep = "  random: {count: 200, parameters: {optimization.epochs: {log_int: [1, 4]}}}\n"
    values = _values(tmp_path, sweep)
    assert sorted(value["optimization.epochs"] for value in values) == [1, 2, 3, 4], "each run once"


def test_the_draws_of_a_file_never_change(tmp_path: Path) -> None:
    """Else the ids of existing runs would."""
    first = _expand(tmp_path, RANDOM)[0]
    assert first.values == {
        "optimization.optimizer.lr": 0.0390662,
        "optimization.optimizer.weight_decay": 0.08,
        "optimization.schedule.warmup_steps": 3,
        "optimization.optimizer.name": "adamw",
    }
    assert first.id == "bdcf8c07b1"


def test_more_draws_and_parameters_leave_earlier_draws_alone(tmp_path: Path) -> None:
    before = _expand(tmp_path, RANDOM)
    more = _expand(tmp_path, RANDOM.replace("count: 12", "count: 20"))
    assert [variant.id for variant in more[:12]] == [variant.id for variant in before]
    other = _values(tmp_path, RANDOM + "      seed: {int: [0, 1000]}\n")
    assert [{**values, "seed": 0} for values in other] == [{**each.values, "seed": 0} for each in before]
    assert [each.values for each in before] != _values(tmp_path, RANDOM.replace("seed: 7", "seed: 8"))


def test_a_new_choice_changes_only_the_draws_that_it_wins(tmp_path: Path) -> None:
    before = [values[_NAME] for values in _values(tmp_path, RANDOM)]
    more = RANDOM.replace("[sgd, adamw]", "[adam, sgd, adamw]")
    after = [values[_NAME] for values in _values(tmp_path, more)]
    assert {new for old, new in zip(before, after, strict=True) if old != new} == {"adam"}
    assert 0 < after.count("adam") < 8


CONDITION = f"""\
  random:
    count: 20
    parameters:
      {_NAME}: {{choice: [sgd, adamw, rmsprop]}}
      {_LR}: {{log_uniform: [0.001, 0.1]}}
      {_MOMENTUM}: {{uniform: [0.5, 0.9], when: {{{_NAME}: [sgd, rmsprop]}}}}
"""


def test_a_parameter_with_a_condition_is_varied_only_under_it(tmp_path: Path) -> None:
    drawn = _values(tmp_path, CONDITION)
    assert {values[_NAME] for values in drawn if _MOMENTUM in values} == {"sgd", "rmsprop"}
    assert {values[_NAME] for values in drawn if _MOMENTUM not in values} == {"adamw"}
    lines = CONDITION.splitlines(keepends=True)
    assert _ids(tmp_path, "".join([*lines[:3], *lines[:2:-1]])) == _ids(tmp_path, CONDITION), "in any order"


def test_a_condition_may_name_a_key_of_the_grid(tmp_path: Path) -> None:
    sweep = f"""\
  grid: {{{_NAME}: [sgd, adamw]}}
  random:
    count: 2
    parameters: {{{_MOMENTUM}: {{uniform: [0.5, 0.9], when: {{{_NAME}: sgd}}}}}}
"""
    runs = [(values[_NAME], _MOMENTUM in values) for values in _values(tmp_path, sweep)]
    assert runs == [("sgd", True), ("adamw", False), ("sgd", True)], "adamw once: both draws are one run"


def test_excluded_combinations_are_not_run(tmp_path: Path) -> None:
    grid = f"  grid: {{{_NAME}: [sgd, adamw], seed: [0, 1, 2]}}\n"
    left = _values(tmp_path, grid + f"  exclude: [{{{_NAME}: sgd, seed: [1, 2]}}]\n")
    assert [(values[_NAME], values["seed"]) for values in left] == [
        ("sgd", 0), ("adamw", 0), ("adamw", 1), ("adamw", 2),
    ]  # fmt: skip


def test_many_bad_draws_are_a_hundred_lines(tmp_path: Path) -> None:
    sweep = "  random: {count: 300, parameters: {optimization.micro_batch_size: {int: [33, 900]}}}\n"
    with pytest.raises(BadFileError) as error:
        _expand(tmp_path, sweep)
    assert len(error.value.problems) == 100


def test_a_list_may_vary_the_size_of_the_job(tmp_path: Path) -> None:
    file = loaded(tmp_path, more="slurm: {}\nsweep:\n  list: [{}, {slurm.nodes: 2}]\n")
    assert [run.ranks for run in plan_on_slurm(file).runs] == [1, 2]


SEARCH = """\
sweep:
  search:
    trials: 5
    metric: accuracy
    mode: max
    parameters:
      optimization.optimizer.lr: {log_uniform: [0.001, 0.1]}
      optimization.optimizer.name: {choice: [sgd, adamw, rmsprop]}
"""


def test_a_search_without_trials_is_checked_with_each_choice_and_bound(tmp_path: Path) -> None:
    file = loaded(tmp_path, more=SEARCH)
    assert [variant.values for variant in expand(file)] == [
        {_LR: 0.001, _NAME: "sgd"},
        {_LR: 0.1, _NAME: "adamw"},
        {_LR: 0.001, _NAME: "rmsprop"},
    ]
    trial = {_LR: 0.5, _NAME: "sgd"}
    assert [run.values for run in make_plan(file, trials=[trial]).runs] == [trial]
    assert make_plan(file, trials=[]).runs == []


def test_an_id_stays_what_it_was_in_earlier_versions(tmp_path: Path) -> None:
    # Changing this makes every user's finished runs train again.
    file = loaded(tmp_path, "model.name=some.module:build")
    assert run_id(file.experiment) == "75750e4a00"


#: Keys that are not in the id, and defaults written out.
SAME_RUN = [
    "name=other", "device=auto", "environment.modules=[cuda]", "logging.every_steps=3", "checkpoint.keep=7",
    "sweep.grid={seed: [1, 2]}", "slurm.nodes=4", "data.root=elsewhere", "data.workers=5", "seed=0",
    "compile=false", "data.augment={hflip: 0.0}", "optimization.schedule={name: constant}", "sweep={}",
]  # fmt: skip
ANOTHER_RUN = [
    "seed=1", "deterministic=true", "precision=bf16", "parallel.strategy=fsdp",
    "optimization.optimizer.lr=0.2", "data.args.num_samples=101", "data.transform=my_transforms:train",
    "evaluation.every_epochs=2", "compile=true",
]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "is_same"), [(key, True) for key in SAME_RUN] + [(key, False) for key in ANOTHER_RUN]
)
def test_which_keys_make_another_id(tmp_path: Path, override: str, is_same: bool) -> None:
    plain = run_id(loaded(tmp_path).experiment)
    assert (run_id(loaded(tmp_path, override).experiment) == plain) is is_same


def test_how_images_are_read_keeps_the_id(tmp_path: Path) -> None:
    data = "data={name: imagefolder, root: images, image_size: 8%s}"
    plain = run_id(loaded(tmp_path, data % "").experiment)
    assert run_id(loaded(tmp_path, data % ", cache: packs, stage: true").experiment) == plain


def test_a_resumed_run_may_change_how_it_is_spread_but_not_what_it_learns(tmp_path: Path) -> None:
    old = loaded(tmp_path).experiment
    allowed = loaded(tmp_path, "parallel.strategy=fsdp", "data.workers=3", "logging.every_steps=1").experiment
    assert changes_identity(old, allowed) == []
    refused = loaded(tmp_path, "optimization.optimizer.lr=0.2", "seed=4").experiment
    assert changes_identity(old, refused) == ["seed", "optimization.optimizer.lr"]
