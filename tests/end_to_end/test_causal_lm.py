"""A small GPT on a small text, by the real command: strategies agree, a kill changes no bit."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hpc_train.paths import RunPaths
from tests.end_to_end.runs import (
    assert_equal_to_the_bit,
    final_tensors,
    hpc_train,
    killed_run,
    resume,
    rows,
    submit,
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


def test_it_learns_and_reports_it(quiet: RunPaths) -> None:
    first, last = rows(quiet, "val")
    assert last["loss"] < first["loss"] < losses(quiet)[0] - 0.1
    assert last["perplexity"] == pytest.approx(torch.tensor(last["loss"]).exp().item(), rel=1e-5)
    assert 0.1 < last["accuracy"] < 1


def test_a_killed_run_resumes_bitwise_and_other_text_is_refused(
    quiet: RunPaths, text: str, tmp_path: Path
) -> None:
    paths = killed_run(tmp_path, 7, "parallel.strategy=fsdp", text=text)
    root = Path(text.partition("root: ")[2].partition(",")[0])
    other = tmp_path / "other.txt"
    other.write_text(root.read_text().replace("a", "k"))  # as many letters: all shapes fit
    submitted = paths.run.read_text()
    # Where the files could not be read when the run was created, its ranks find out.
    unread = json.dumps(json.loads(submitted) | {"inputs": {}})
    for record, refusal in (
        (submitted, "data.root: the files are not those that"),
        (unread, "data.root: the classes are not those that checkpoint"),
    ):
        paths.run.write_text(record)
        done = hpc_train("resume", paths.folder, f"data.root={other}")
        assert done.code == 65 and refusal in done.err, done.err
    paths.run.write_text(submitted)
    resume(paths, "data.workers=2", f"data.root={root}")
    assert_equal_to_the_bit(quiet, paths)


def test_a_tied_weight_is_exported_under_both_names(quiet: RunPaths, tmp_path: Path) -> None:
    target = tmp_path / "weights.safetensors"
    done = hpc_train("export", quiet.folder, "-o", target)
    assert done.code == 0, done.err
    weights = load_file(target)
    assert torch.equal(weights["head.weight"], weights["token_embedding.weight"])
    assert torch.equal(weights["head.weight"], final_tensors(quiet)["model.token_embedding.weight"])
