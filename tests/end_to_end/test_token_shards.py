"""A small Llama-style model on token shards, by the real commands: prepare, submit, kill, resume."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from hpc_train.datasets.building import build_source
from hpc_train.paths import RunPaths
from hpc_train.validate.loading import load
from tests.end_to_end.runs import (
    assert_equal_to_the_bit,
    hpc_train,
    killed_run,
    resume,
    submit,
    write_experiment,
)

pytestmark = pytest.mark.slow

STEPS, LENGTH = 20, 16
EXPERIMENT = f"""\
name: shards
seed: 5
task: causal_lm
model:
  name: gpt
  args: {{style: llama, num_layers: 2, num_heads: 4, num_kv_heads: 2, dim: 16, tie_embeddings: false}}
data: {{name: tokens, root: ROOT, args: {{tokenizer: bytes, sequence_length: {LENGTH}, shard_tokens: 500}}}}
optimization:
  steps: {STEPS}
  global_batch_size: 8
  micro_batch_size: 2
  optimizer: {{name: sgd, lr: 0.3, momentum: 0.9}}
  schedule: {{name: constant}}
precision: fp64
evaluation: {{every_steps: 10}}
checkpoint: {{every_steps: 3}}
logging: {{every_steps: 1}}
"""


def documents(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 6))) for _ in range(20)]
    return [" ".join(draw.choices(words, k=30)) for _ in range(count)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the experiment on 2,000 tokens, an epoch of 14 steps."""
    root = tmp_path_factory.mktemp("corpus")
    for part, count, seed in (("train", 13, 0), ("val", 3, 1)):
        lines = [json.dumps({"text": document}) for document in documents(count, seed)]
        (root / f"{part}.jsonl").write_text("\n".join(lines))
    return EXPERIMENT.replace("ROOT", str(root))


@pytest.fixture(scope="module")
def prepared(text: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    done = hpc_train("prepare", write_experiment(tmp_path_factory.mktemp("prepare"), text))
    assert done.code == 0, done.err
    assert "train: 2" in done.err and "of 13 documents written" in done.err, done.err
    return text


@pytest.fixture(scope="module")
def quiet(prepared: str, tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Two ranks, uninterrupted."""
    return submit(tmp_path_factory.mktemp("quiet"), text=prepared)


def test_a_run_killed_in_mid_epoch_resumes_bitwise_and_on_no_other_text(
    quiet: RunPaths, prepared: str, tmp_path: Path
) -> None:
    paths = killed_run(tmp_path, 7, text=prepared, needs_checkpoint=True)
    (other := tmp_path / "other").mkdir()
    (other / "train.jsonl").write_text("\n".join(json.dumps({"text": each}) for each in documents(13, 2)))
    data = load(write_experiment(tmp_path, prepared)).experiment.data
    build_source(data.model_copy(update={"root": str(other)}), download=True)
    done = hpc_train("resume", paths.folder, f"data.root={other}")
    assert done.code == 65 and "data.root: the files are not those that" in done.err, done.err
    resume(paths, "data.workers=1")
    assert_equal_to_the_bit(quiet, paths)
    sample = (paths.evaluation(STEPS) / "sample.txt").read_text()
    assert len(sample) > 64


def test_a_plan_knows_the_steps_of_an_epoch(prepared: str, tmp_path: Path) -> None:
    done = hpc_train("plan", write_experiment(tmp_path, prepared), "--json")
    assert done.code == 0, done.err
    (run,) = json.loads(done.out)["runs"]
    tokens = sum(len(document.encode()) + 1 for document in documents(13, 0))
    assert run["steps_per_epoch"] == (tokens - 1) // LENGTH // 8
