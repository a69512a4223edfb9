from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpc_train.config.schema import Experiment
from hpc_train.datasets.building import build_source
from hpc_train.datasets.tokenization import decoder_of
from hpc_train.datasets.types import Batch, DataInfo
from hpc_train.models.building import build_model
from hpc_train.tasks.base import make_task
from hpc_train.training.evaluation_outputs import TextSamples, continued, drawn

INFO = DataInfo(5, 0, (), (), tuple("abcde"), sequence_length=4)


def after(batch: Batch) -> Tensor:
    """Return logits that are certain of the next letter of the alphabet, and of a token beyond it."""
    logits = torch.nn.functional.one_hot((batch.inputs + 1) % 5, 7).float() * 100
    logits[..., 6] = 1000
    return logits


def test_a_sample_continues_the_prompt_over_the_end_of_the_window() -> None:
    assert continued(after, (2,), 9, INFO, seed=0, step=3) == [2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_input_is_always_one_window() -> None:
    shapes = []

    def outputs(batch: Batch) -> Tensor:
        shapes.append(tuple(batch.inputs.shape))
        return after(batch)

    continued(outputs, (0, 1, 2), 6, INFO, seed=0, step=3)
    assert shapes == [(1, 4)] * 6


def test_tokens_are_drawn_by_probability_from_the_most_probable() -> None:
    logits = torch.tensor([0.1, 0.6, 0.3]).log()
    assert [drawn(logits, number) for number in (0.0, 0.59, 0.61, 0.89, 0.91, 1 - 1e-16)] == [
        1,
        1,
        2,
        2,
        0,
        0,
    ]
    even = torch.zeros(100)
    assert {drawn(even, number / 1000) for number in range(1000)} == set(range(40)), "of 40"


def test_draws_depend_on_seed_and_step_and_touch_no_generator() -> None:
    def even(batch: Batch) -> Tensor:
        return torch.zeros(1, 4, 5)

    before = torch.get_rng_state()
    samples = [continued(even, (0,), 30, INFO, *key) for key in ((0, 1), (0, 1), (0, 2), (1, 1))]
    assert torch.equal(torch.get_rng_state(), before)
    assert samples[0] == samples[1] and len(set(map(tuple, samples))) == 3
    assert set(samples[0]) == set(range(5))


def experiment(root: Path, strategy: str = "ddp", sample_tokens: int = 8) -> Experiment:
    return Experiment.model_validate(
        {
            "name": "x",
            "task": "causal_lm",
            "model": {"name": "gpt", "args": {"dim": 16, "num_layers": 1, "num_heads": 2}},
            "data": {"name": "text", "root": str(root), "args": {"sequence_length": 8}},
            "optimization": {
                "steps": 1,
                "global_batch_size": 4,
                "micro_batch_size": 4,
                "optimizer": {"name": "sgd", "lr": 0.1},
            },
            "parallel": {"strategy": strategy},
            "evaluation": {"sample_tokens": sample_tokens},
        }
    )


def test_the_file_has_prompt_and_continuation(tmp_path: Path) -> None:
    (root := tmp_path / "text.txt").write_text("to be or not to be " * 20)
    config = experiment(root)
    source = build_source(config.data)
    task = make_task(config, source.info)
    torch.manual_seed(0)
    model = build_model(config.model, source.info).eval()
    samples = TextSamples.of(config, source, task, lambda batch: task.forward(model, batch))
    assert samples is not None and source.val is not None
    with torch.no_grad():
        files = samples.files(5, {})
    prompt, text = files["sample.txt"].decode().split("\n--- continued by the model: ---\n")
    first, _ = source.val.batch(torch.tensor([0]))  # type: ignore[union-attr]
    decoder = decoder_of(source.info)
    assert decoder is not None and prompt == decoder.decode(first[0, :4].tolist())
    assert len(text) == 8 + 1 and set(text) <= {*source.info.class_names, "\n"}
    unknown = TextSamples(after, DataInfo(5, 0, (), (), (), 4, tokenizer="gpt2"), 0, (1, 2), 1)
    assert unknown.files(0, {})["sample.txt"].decode().startswith("1 2\n"), "numbers where none decodes"


@pytest.mark.parametrize("changes", [{"strategy": "pipeline"}, {"strategy": "split"}, {"sample_tokens": 0}])
def test_there_is_no_sample_without_the_whole_model_or_if_it_is_off(
    changes: dict[str, str], tmp_path: Path
) -> None:
    (root := tmp_path / "text.txt").write_text("to be or not to be " * 20)
    config = experiment(root, **changes)  # type: ignore[arg-type]
    source = build_source(config.data)
    assert TextSamples.of(config, source, make_task(config, source.info), after) is None
