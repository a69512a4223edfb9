from __future__ import annotations

from pathlib import Path

from hpc_train.experiment.plan.sweep import describe, expand, run_id
from tests.plan.files import loaded


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


def test_values_are_described_as_in_an_experiment_file() -> None:
    values = {
        "compile": True,
        "optimization.clip_grad_norm": None,
        "data.name": "digits",
        "model.args.x": [1, "é"],
    }
    words = 'compile=true optimization.clip_grad_norm=null data.name=digits model.args.x=[1, "é"]'
    assert describe(values) == words
