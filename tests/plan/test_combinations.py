"""``sweep.list``, ``sweep.random`` and ``sweep.exclude``: which runs there are, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_train.errors import BadFileError
from hpc_train.experiment.plan.planning import make_plan
from hpc_train.experiment.plan.sweep import Variant, expand
from tests.plan.files import loaded, plan_here, plan_on_slurm

_LR, _MOMENTUM = "optimization.optimizer.lr", "optimization.optimizer.momentum"
_NAME = "optimization.optimizer.name"


def _expand(folder: Path, sweep: str, *overrides: str) -> list[Variant]:
    return expand(loaded(folder, *overrides, more=f"sweep:\n{sweep}"))


def _values(folder: Path, sweep: str) -> list[dict[str, Any]]:
    return [variant.values for variant in _expand(folder, sweep)]


def _ids(folder: Path, sweep: str) -> list[str]:
    return [variant.id for variant in _expand(folder, sweep)]


def _problems(folder: Path, sweep: str) -> list[str]:
    with pytest.raises(BadFileError) as error:
        _expand(folder, sweep)
    return [line.removeprefix(f"{folder}/") for line in error.value.problems]


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
    after = [
        values[_NAME] for values in _values(tmp_path, RANDOM.replace("[sgd, adamw]", "[adam, sgd, adamw]"))
    ]
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
    (line,) = _problems(tmp_path, "  grid: {seed: [0, 1]}\n  exclude: [{seed: [0, 1]}]\n")
    assert line == "exp.yaml:13:12: sweep.exclude: excludes all runs; take one of its entries out"


def _one(distribution: str, key: str = "seed", more: str = "") -> str:
    return f"  random: {{count: 2, parameters: {{{key}: {{{distribution}}}}}}}\n{more}"


def _search(metric: str) -> str:
    parameters = "{data.args.x: {int: [0, 9]}}"
    return f"  search: {{trials: 2, metric: {metric}, mode: max, parameters: {parameters}}}\n"


#: The section ``sweep`` from its second line on, which is the file's 12th, and part of what is said.
WRONG = [
    ("  list: [{optimizer.lr: 1}]\n", "12:11: sweep.list[0].optimizer.lr: unknown key"),
    ("  list: [{seed: 1}, {seed: 1}]\n", "12:21: sweep.list[1]: is the same as run 1 of the list"),
    ("  list: [{seed: x}]\n", "12:17: sweep.list[0].seed: needs a whole number of at least 0 and below 2*"),
    ("  list: [{name: a}]\n", "12:11: sweep.list[0].name: is not part of a run's id, so all values would"),
    ("  list: [{seed: 1}]\n  grid: {seed: [2]}\n", "12:11: sweep.list[0].seed: is also in sweep.grid"),
    ("  random: {count: 0, parameters: {seed: {int: [0, 1]}}}\n", "12:19: sweep.random.count: needs a whole"),
    ("  random: {parameters: {seed: {int: [0, 1]}}}\n", "sweep.random.count: is missing; write count: "),
    ("  random: {count: 2}\n", "sweep.random.parameters: is missing"),
    ("  random: {count: 2, parameters: {}}\n", "sweep.random.parameters: names no parameter; "),
    (_one(""), "12:35: sweep.random.parameters.seed: needs one of choice, uniform, log_uniform, int, log_"),
    (_one("int: [0, 1], choice: [3]"), "sweep.random.parameters.seed: has choice and int; keep one of them"),
    (_one("normal: [0, 1]"), "sweep.random.parameters.seed.normal: unknown key; "),
    (_one("log_uniform: [0, 1]", _LR), "lr.log_uniform[0]: needs a number above 0, got 0; "),
    (_one("int: [0, 1.5]"), "sweep.random.parameters.seed.int[1]: needs a whole number"),
    (_one("int: [3, 1]"), "12:47: sweep.random.parameters.seed.int: is empty: 3 is above 1"),
    (_one("int: [3, 3]"), "sweep.random.parameters.seed.int: has the one value 3"),
    (_one("log_int: [1, 9], step: 2"), "seed.step: has no effect with log_int"),
    (_one("int: [1, 9], step: 0.5"), "seed.step: needs a whole number, got 0.5; write one like 2"),
    (_one("int: [1, 9], step: 20"), "seed.step: 20.0 exceeds the range of 8; write a smaller step"),
    (_one("uniform: [-1, 1]", _LR), "optimization.optimizer.lr.uniform[0]: needs a number"),
    (_one("choice: [1, 1]"), "seed.choice[1]: is the same as value 1 of the list; take it out"),
    (
        _one("int: [0, 99]", "data.args.x", "  grid: {seed: [0, 1, 2]}\n").replace("count: 2", "count: 5000"),
        "12:3: sweep: makes 15,000 runs; write at most 10,000",
    ),
    (_one("int: [0, 9], when: {data.args.x: 1}"), "sweep.random.parameters.seed.when.data.args.x: is not"),
    (_one("choice: [1, 2], when: {seed: 1}"), "12:58: sweep.random.parameters.seed.when: depends on the p"),
    (
        _one("int: [0, 9], when: {data.args.x: b}", more="  grid: {data.args.x: [a]}\n"),
        "12:75: sweep.random.parameters.seed.when.data.args.x: no run has the text 'b'; write a value",
    ),
    ("  grid: {seed: [0, 1]}\n  exclude: [{seed: 3}]\n", "13:20: sweep.exclude[0].seed: no run has 3"),
    ("  grid: {seed: [0, 1]}\n  exclude: [{}]\n", "13:13: sweep.exclude[0]: excludes all runs; "),
    (_one("int: [0, 9]", more="  exclude: [{seed: 3}]\n"), "sweep.exclude[0].seed: seed is drawn from a r"),
    ("  grid: {seed: [1]}\n" + _search("accuracy"), "13:3: sweep.search: excludes sweep.grid"),
    (_search("acuracy"), "sweep.search.metric: acuracy is not a metric of classification"),
    (_search("f1_micro"), "sweep.search.metric: f1_micro is not a metric of classification (target: class)"),
    (_search("val/acuracy"), "sweep.search.metric: acuracy is not a metric of classification"),
]


@pytest.mark.parametrize(("sweep", "part"), WRONG, ids=[part for _, part in WRONG])
def test_what_is_wrong_is_said_at_its_place(tmp_path: Path, sweep: str, part: str) -> None:
    (found,) = _problems(tmp_path, sweep)
    assert part in found


def test_a_draw_that_does_not_fit_the_file_is_named(tmp_path: Path) -> None:
    sweep = "  random: {count: 9, parameters: {optimization.micro_batch_size: {choice: [8, 5]}}}\n"
    (line,) = _problems(tmp_path, sweep)
    assert line.startswith("exp.yaml:12:66: sweep.random.parameters.optimization.micro_batch_size: ")
    assert "(optimization.micro_batch_size is 5)" in line


def test_many_bad_draws_are_a_hundred_lines(tmp_path: Path) -> None:
    sweep = "  random: {count: 300, parameters: {optimization.micro_batch_size: {int: [33, 900]}}}\n"
    assert len(_problems(tmp_path, sweep)) == 100


def test_a_list_may_vary_the_size_of_the_job_but_not_on_this_machine(tmp_path: Path) -> None:
    file = loaded(tmp_path, more="slurm: {}\nsweep:\n  list: [{}, {slurm.nodes: 2}]\n")
    assert [run.ranks for run in plan_on_slurm(file).runs] == [1, 2]
    with pytest.raises(BadFileError, match=r"sweep.list\[1\].slurm.nodes: has no effect on this machine"):
        plan_here(file, 1)


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
    assert [run.values for run in make_plan(file, trials=[{_LR: 0.5, _NAME: "sgd"}]).runs] == [
        {_LR: 0.5, _NAME: "sgd"}
    ]
    assert make_plan(file, trials=[]).runs == []
