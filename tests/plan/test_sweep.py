from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.errors import BadFileError
from hpc_train.experiment.plan.sweep import describe, expand, run_id
from tests.plan.files import loaded, plan_here


def test_the_last_key_of_the_grid_varies_fastest(tmp_path: Path) -> None:
    variants = expand(loaded(tmp_path, "sweep.grid={optimization.optimizer.lr: [0.1, 0.2], seed: [3, 4]}"))
    assert [list(variant.values.values()) for variant in variants] == [[0.1, 3], [0.1, 4], [0.2, 3], [0.2, 4]]
    assert [(v.experiment.optimization.optimizer.lr, v.experiment.seed) for v in variants] == [
        (0.1, 3),
        (0.1, 4),
        (0.2, 3),
        (0.2, 4),
    ]


def test_a_file_without_a_grid_is_one_run(tmp_path: Path) -> None:
    file = loaded(tmp_path)
    (only,) = expand(file)
    assert only.values == {}
    assert only.id == run_id(file.experiment)


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
    assert [variant.experiment.slurm and variant.experiment.slurm.nodes for variant in variants] == [
        1,
        2,
        "1-2",
    ]
    assert len({variant.id for variant in variants}) == 3
    again = expand(loaded(tmp_path, "sweep.grid={slurm.nodes: [2, 1]}", more=SCALING))
    assert [variant.id for variant in again] == [variants[1].id, variants[0].id]


def test_the_order_of_scaled_keys_does_not_change_ids(tmp_path: Path) -> None:
    one, other = (
        expand(loaded(tmp_path, f"sweep.grid={{{keys}}}"))
        for keys in (
            "slurm.nodes: [2], slurm.ranks_per_node: [1]",
            "slurm.ranks_per_node: [1], slurm.nodes: [2]",
        )
    )
    assert [variant.id for variant in one] == [variant.id for variant in other]


def test_a_size_that_does_not_fit_is_refused_at_its_value(tmp_path: Path) -> None:
    with pytest.raises(BadFileError) as error:
        expand(loaded(tmp_path, more=SCALING.replace('"1-2"', "9")))
    (line,) = error.value.problems
    assert "sweep.grid.slurm.nodes[2]: " in line and "micro-batches" in line


def test_this_machine_has_no_nodes_to_vary(tmp_path: Path) -> None:
    with pytest.raises(BadFileError) as error:
        plan_here(loaded(tmp_path, more=SCALING), 1)
    (line,) = error.value.problems
    assert (
        "sweep.grid.slurm.nodes: has no effect on this machine, so all values would give the same run; "
        in line
    )
    assert line.endswith("take it out of the grid, or submit it to a queue")


def test_two_combinations_that_are_one_run_are_refused_at_the_grid(tmp_path: Path) -> None:
    # Written differently, and the same once defaults are filled in.
    file = loaded(tmp_path, more="sweep:\n  grid: {optimization.schedule: [{name: constant}, {}]}\n")
    with pytest.raises(BadFileError) as error:
        expand(file)
    (line,) = error.value.problems
    assert line.startswith(f"{tmp_path}/exp.yaml:12:9: sweep.grid: ")
    assert "are the same run" in line


def test_every_bad_combination_is_reported_at_once(tmp_path: Path) -> None:
    more = "sweep:\n  grid: {optimization.micro_batch_size: [8, 5, 7]}\n"
    with pytest.raises(BadFileError) as error:
        expand(loaded(tmp_path, more=more))
    assert len(error.value.problems) == 2


def test_values_are_described_as_in_an_experiment_file() -> None:
    values = {
        "compile": True,
        "optimization.clip_grad_norm": None,
        "data.name": "digits",
        "model.args.x": [1, "é"],
    }
    words = 'compile=true optimization.clip_grad_norm=null data.name=digits model.args.x=[1, "é"]'
    assert describe(values) == words
