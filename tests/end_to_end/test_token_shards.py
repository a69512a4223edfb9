"""A small Llama-style model on token shards, by the real commands: prepare, submit, kill, resume."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.validate.loading import load
from hpc_train.paths import RunPaths
from hpc_train.run.checkpoints import committed
from hpc_train.training.datasets.batches import evaluation_batches
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.random_numbers import seed_build
from hpc_train.training.datasets.sampler import MicroBatchSampler, Position
from hpc_train.training.datasets.types import Batch
from hpc_train.training.models.building import build_model
from hpc_train.training.tasks.base import make_task
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import (
    assert_equal_to_the_bit,
    final_tensors,
    hpc_train,
    kill_everything,
    last_step,
    only_run,
    rows,
    start,
    submit,
    wait_for,
    write_experiment,
)

pytestmark = pytest.mark.slow

STEPS, LENGTH = 20, 16
#: After this step a run is killed.
HELD = 7
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


def experiment(text: str, folder: Path) -> Experiment:
    return load(write_experiment(folder, text)).experiment


@pytest.fixture(scope="module")
def quiet(prepared: str, tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Two ranks, uninterrupted."""
    return submit(tmp_path_factory.mktemp("quiet"), text=prepared)


@pytest.mark.parametrize("ranks", [1, 2])
def test_twenty_steps_are_those_of_plain_pytorch(
    ranks: int, quiet: RunPaths, prepared: str, tmp_path: Path
) -> None:
    """The bare loop reads the text itself, and of hpc-train has the model and the order of samples."""
    paths = quiet if ranks == 2 else submit(tmp_path, "parallel.strategy=fsdp", devices=1, text=prepared)
    stream = [token for document in documents(13, 0) for token in (*document.encode(), 256)]
    config = experiment(prepared, tmp_path)
    seed_build(config.seed)
    model = build_model(config.model, build_source(config.data).info).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    samples = (len(stream) - 1) // LENGTH
    sampler = MicroBatchSampler(
        samples, global_batch_size=8, micro_batch_size=8, seed=5, position=Position(0), total_steps=STEPS
    )
    losses = []
    for slot in sampler:
        places = [index * LENGTH for index in slot.indices.tolist()]
        windows = torch.tensor([stream[place : place + LENGTH + 1] for place in places])
        loss = functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [row["loss"] for row in rows(paths, "train")] == pytest.approx(losses, abs=1e-9)
    text = (paths.evaluation(STEPS) / "sample.txt").read_text()
    assert text == (quiet.evaluation(STEPS) / "sample.txt").read_text() and len(text) > 64
    found = final_tensors(paths)
    for name, value in model.named_parameters():
        torch.testing.assert_close(found[f"model.{name}"], value.detach(), rtol=0, atol=1e-9, msg=name)


def test_a_run_killed_in_mid_epoch_resumes_bitwise_and_on_no_other_text(
    quiet: RunPaths, prepared: str, tmp_path: Path
) -> None:
    runs = {"HPC_TRAIN_RUNS": str(tmp_path / "runs")}
    file = write_experiment(tmp_path, prepared)
    with Hold(tmp_path, HELD) as hold:
        process = start("submit", file, hold.override, "--local", "--devices", "2", **runs)
        hold.wait(process)
        paths = only_run(tmp_path)
        wait_for(lambda: bool(committed(paths)) or process.poll() is not None, "a checkpoint")
        kill_everything(process, paths)
    process.communicate()
    assert last_step(paths) == HELD
    (other := tmp_path / "other").mkdir()
    (other / "train.jsonl").write_text("\n".join(json.dumps({"text": each}) for each in documents(13, 2)))
    elsewhere = experiment(prepared, tmp_path).data.model_copy(update={"root": str(other)})
    build_source(elsewhere, download=True)
    done = hpc_train("resume", paths.folder, f"data.root={other}", **runs)
    assert done.code == 65 and "data.root: the files are not those that" in done.err, done.err
    done = hpc_train("resume", paths.folder, "data.workers=1", **runs)
    assert done.code == 0, done.err
    assert_equal_to_the_bit(quiet, paths)


def test_an_evaluation_is_the_same_on_one_two_and_three_ranks(prepared: str, tmp_path: Path) -> None:
    config = experiment(prepared, tmp_path)
    source = build_source(config.data)
    assert source.val is not None
    task = make_task(config, source.info)
    seed_build(0)
    model = build_model(config.model, source.info).double()
    found = []
    for ranks in (1, 2, 3):
        batches: list[Batch] = []
        for rank in range(ranks):
            batches += evaluation_batches(source.val, config, rank, ranks, torch.device("cpu"))
        with torch.no_grad():
            by_number = {batch.number: task.sums(task.forward(model, batch), batch) for batch in batches}
        sums = {name: sum(by_number[number][name].item() for number in sorted(by_number))
                for name in by_number[0]}  # fmt: skip
        found.append(task.metrics(sums))
    assert found[0] == found[1] == found[2] and found[0].keys() == {"loss", "perplexity", "accuracy"}


def test_a_plan_knows_the_steps_of_an_epoch(prepared: str, tmp_path: Path) -> None:
    done = hpc_train("plan", write_experiment(tmp_path, prepared), "--json")
    assert done.code == 0, done.err
    (run,) = json.loads(done.out)["runs"]
    tokens = sum(len(document.encode()) + 1 for document in documents(13, 0))
    assert run["steps_per_epoch"] == (tokens - 1) // LENGTH // 8
