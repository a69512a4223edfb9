"""A small GPT on a small text, by the real command: strategies agree, a kill changes no bit."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hpc_train.paths import RunPaths
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
    write_experiment,
)

pytestmark = pytest.mark.slow

STEPS = 40
EXPERIMENT = f"""\
name: letters
seed: 5
task: causal_lm
model: {{name: gpt, args: {{num_layers: 2, num_heads: 2, dim: 32, dropout: 0.1}}}}
data: {{name: text, root: ROOT, args: {{sequence_length: 32, val_fraction: 0.05}}}}
optimization:
  steps: {STEPS}
  global_batch_size: 24
  micro_batch_size: 8
  optimizer: {{name: adamw, lr: 0.005}}
  clip_grad_norm: 1.0
precision: fp64
evaluation: {{every_steps: 20}}
checkpoint: {{every_steps: 3}}
logging: {{every_steps: 1}}
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the experiment on a text with something to learn: words that come again and again."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 6))) for _ in range(20)]
    root = tmp_path_factory.mktemp("text") / "words.txt"
    root.write_text(" ".join(draw.choices(words, k=10_000)))
    return EXPERIMENT.replace("ROOT", str(root))


@pytest.fixture(scope="module")
def quiet(text: str, tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Three micro-batches on two ranks: one slot is spare."""
    return submit(tmp_path_factory.mktemp("fsdp"), "parallel.strategy=fsdp", text=text)


def losses(paths: RunPaths) -> torch.Tensor:
    return torch.tensor([row["loss"] for row in rows(paths)], dtype=torch.float64)


def test_fsdp_trains_as_ddp_does(quiet: RunPaths, text: str, tmp_path: Path) -> None:
    ddp = submit(tmp_path, "parallel.strategy=ddp", text=text)
    torch.testing.assert_close(losses(quiet), losses(ddp), rtol=0, atol=1e-9)
    ours, theirs = final_tensors(quiet), final_tensors(ddp)
    assert ours.keys() == theirs.keys()
    for name in (name for name in ours if name.startswith("model.")):
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-9, msg=name)


def test_it_learns_and_reports_it(quiet: RunPaths) -> None:
    first, last = rows(quiet, "val")
    assert last["loss"] < first["loss"] < losses(quiet)[0] - 0.1
    assert last["perplexity"] == pytest.approx(torch.tensor(last["loss"]).exp().item(), rel=1e-5)
    assert 0.1 < last["accuracy"] < 1


def test_a_killed_run_resumes_bitwise_and_other_text_is_refused(
    quiet: RunPaths, text: str, tmp_path: Path
) -> None:
    runs = {"HPC_TRAIN_RUNS": str(tmp_path / "runs")}
    experiment = write_experiment(tmp_path, text)
    with Hold(tmp_path, 7) as hold:
        overrides = ("parallel.strategy=fsdp", hold.override)
        process = start("submit", experiment, *overrides, "--local", "--devices", "2", **runs)
        hold.wait(process)
        paths = only_run(tmp_path)
        kill_everything(process, paths)
    process.communicate()
    assert last_step(paths) == 7
    root = Path(text.partition("root: ")[2].partition(",")[0])
    other = tmp_path / "other.txt"
    other.write_text(root.read_text().replace("a", "k"))  # as many letters: all shapes fit
    done = hpc_train("resume", paths.folder, f"data.root={other}", **runs)
    assert done.code == 65, done.err
    assert "data.root: the files are not those that" in done.err
    # Where the files could not be read when the run was created, its ranks find out.
    noted = paths.run.read_text()
    paths.run.write_text(json.dumps(json.loads(noted) | {"inputs": {}}))
    done = hpc_train("resume", paths.folder, f"data.root={other}", **runs)
    assert done.code == 65, done.err
    assert "data.root: the classes are not those that checkpoint" in done.err
    paths.run.write_text(noted)
    done = hpc_train("resume", paths.folder, "data.workers=2", f"data.root={root}", **runs)
    assert done.code == 0, done.err
    assert_equal_to_the_bit(quiet, paths)


def test_a_tied_weight_is_exported_under_both_names(quiet: RunPaths, tmp_path: Path) -> None:
    target = tmp_path / "weights.safetensors"
    done = hpc_train("export", quiet.folder, "-o", target)
    assert done.code == 0, done.err
    weights = load_file(target)
    assert torch.equal(weights["head.weight"], weights["token_embedding.weight"])
    assert torch.equal(weights["head.weight"], final_tensors(quiet)["model.token_embedding.weight"])


def test_prepare_builds_data_and_model(text: str, tmp_path: Path) -> None:
    prepared = hpc_train("prepare", write_experiment(tmp_path, text))
    assert prepared.code == 0, prepared.err
    assert "training and" in prepared.err and "model gpt: " in prepared.err
