from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from hpc_train.experiment.plan.planning import make_plan
from tests.plan.files import loaded, plan_here, plan_on_slurm

_SLURM = "slurm: {nodes: 2, gpus_per_node: 4, time_limit: 90min}\n"
_16_MICRO_BATCHES = "optimization.micro_batch_size=2"


def test_a_plan_as_json_has_the_numbers_of_its_step(tmp_path: Path) -> None:
    """All keys: tests/cli/test_json.py."""
    (run,) = plan_here(loaded(tmp_path), 2).to_json()["runs"]
    assert run["degrees"] == {"pipeline": 1, "replicate": 2, "shard": 1, "tensor": 1}
    keys = ("ranks", "micro_batches", "accumulation", "steps_per_epoch", "total_steps", "precision")
    assert [run[key] for key in keys] == [2, 4, 2, 3, 9, "fp32"]
    assert (run["stages"], run["schedule"], run["bubble"], run["gpu_hours"]) == (None, None, None, 0.0)


@pytest.mark.parametrize(
    ("overrides", "ranks", "gpu_hours"),
    [
        ([], 8, 12.0),
        (["slurm.nodes=2-3"], 12, 18.0),
        (["slurm.ranks_per_node=1"], 2, 12.0),
        (["slurm.time_limit=null"], 8, None),
        (["slurm.gpus_per_node=0", "slurm.ranks_per_node=3"], 6, 0.0),
    ],
)
def test_slurm_is_planned(tmp_path: Path, overrides: list[str], ranks: int, gpu_hours: float | None) -> None:
    (run,) = plan_on_slurm(loaded(tmp_path, _16_MICRO_BATCHES, *overrides, more=_SLURM)).runs
    assert (run.ranks, run.size.gpu_hours) == (ranks, gpu_hours)


def test_devices_count_locally_even_where_the_file_holds_slurm(tmp_path: Path) -> None:
    (run,) = plan_here(loaded(tmp_path, _16_MICRO_BATCHES, more=_SLURM), 3).runs
    assert (run.ranks, run.accumulation) == (3, 6)


@pytest.mark.parametrize(
    ("parallel", "ranks", "stages", "schedule", "bubble"),
    [
        # 16 micro-batches of one pipeline of four: (4 − 1) / (16 + 4 − 1).
        ("{strategy: pipeline}", 4, 4, "1f1b", 3 / 19),
        ("{strategy: pipeline, pipeline: 2}", 4, 2, "1f1b", 1 / 9),
        ("{strategy: pipeline, pipeline: 2, tensor: 2, schedule: gpipe}", 4, 2, "gpipe", 1 / 17),
        ("{strategy: pipeline, schedule: interleaved, stages_per_rank: 3}", 2, 6, "interleaved", 1 / 49),
        ("{strategy: split}", 4, 4, None, 3 / 4),
        ("{strategy: tensor}", 4, None, None, None),
        ("{strategy: pipeline, pipeline: 1}", 4, None, None, None),
    ],
)
def test_a_pipelines_bubble_is_planned(
    tmp_path: Path, parallel: str, ranks: int, stages: int | None, schedule: str | None, bubble: float | None
) -> None:
    made = loaded(tmp_path, _16_MICRO_BATCHES, f"parallel={parallel}")
    (run,) = plan_here(made, ranks).to_json()["runs"]
    assert (run["stages"], run["schedule"]) == (stages, schedule)
    assert run["bubble"] == (None if bubble is None else pytest.approx(bubble, rel=1e-12))


def test_degrees_are_unknown_where_they_do_not_fit_the_ranks(tmp_path: Path) -> None:
    made = loaded(tmp_path, _16_MICRO_BATCHES, "parallel={strategy: pipeline, pipeline: 3}")
    (run,) = plan_here(made, 4).to_json()["runs"]
    assert (run["degrees"], run["stages"], run["bubble"]) == (None, None, None)


def test_steps_are_unknown_where_the_data_are(tmp_path: Path) -> None:
    (run,) = make_plan(loaded(tmp_path, "data.name=some.module:data")).runs
    assert (run.steps_per_epoch, run.total_steps, run.micro_batches) == (None, None, 4)


def test_a_plan_survives_pickling(tmp_path: Path) -> None:
    plan = make_plan(loaded(tmp_path, "sweep.grid={seed: [1, 2]}"))
    assert pickle.loads(pickle.dumps(plan)) == plan
