"""The recipes of language models: as they are, validated and planned; shortened by overrides, run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.training.datasets.building import build_source
from tests.cli.commands import hpc_train as in_process
from tests.end_to_end.runs import REPOSITORY, rows, submit

SMALL_DATA = ("data.args.tokenizer=bytes", "data.args.sequence_length=16", "data.workers=0")
SMALL_TRAINING = (
    "optimization.steps=4",
    "optimization.global_batch_size=8",
    "optimization.micro_batch_size=2",
    "optimization.schedule.warmup_steps=1",
    "evaluation.every_steps=2",
    "logging.every_steps=1",
    "compile.enabled=false",
    "model.args.num_layers=2",
    "model.args.dim=32",
)
#: Recipe → ranks, GPUs of the recipe, data-parallel ranks of these, and what makes its model small.
RECIPES = {
    "gpt2-124m": (2, 8, 8, ("model.args.num_heads=4", "model.args.num_classes=320")),
    "llama-fsdp-tensor": (
        4,
        32,
        4,
        ("model.args.num_heads=4", "model.args.num_kv_heads=2", "model.args.hidden_dim=64",
         "parallel={strategy: tensor, tensor: 2, shard: 2}"),
    ),
}  # fmt: skip


def recipe(name: str) -> Path:
    return REPOSITORY / "examples" / f"{name}.yaml"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_valid_and_can_be_planned(name: str) -> None:
    validated = in_process("validate", recipe(name))
    assert validated.code == 0, validated.err
    done = in_process("plan", recipe(name), "--json")
    assert done.code == 0, done.err
    (run,) = json.loads(done.out)["runs"]
    _, gpus, data_ranks, _ = RECIPES[name]
    assert run["ranks"] == gpus
    assert run["micro_batches"] == run["accumulation"] * data_ranks, "no spare slots"


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_shortened(name: str, tmp_path: Path) -> None:
    (root := tmp_path / "corpus").mkdir()
    for part in ("train", "val"):
        (root / f"{part}.jsonl").write_text(json.dumps({"text": "to be or not to be " * 30}))
    args = {"tokenizer": "bytes", "sequence_length": 16}
    build_source(DataConfig(name="tokens", root=str(root), args=args), download=True)
    ranks, _, _, small = RECIPES[name]
    overrides = (f"data.root={root}", f"slurm.gpus_per_node={ranks}", "slurm.nodes=1")
    overrides += (*SMALL_DATA, *SMALL_TRAINING, *small)
    paths = submit(tmp_path, *overrides, devices=ranks, text=recipe(name).read_text())
    assert [row["step"] for row in rows(paths, "val")] == [2, 4]
    assert all((paths.evaluation(step) / "sample.txt").stat().st_size for step in (2, 4))
    first, *_, last = rows(paths, "train")
    assert last["loss"] < first["loss"] and rows(paths, "val")[-1]["perplexity"] > 1
