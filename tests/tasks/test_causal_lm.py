from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.tasks.base import make_task
from hpc_train.training.tasks.causal_lm import CausalLM
from tests.experiments import tiny_experiment
from tests.tasks.test_classification import batch

TEXT = DataInfo(7, 0, (), (), sequence_length=5)
IMAGES = DataInfo(10, 1, (0.5,), (0.5,))


def experiment(label_smoothing: float = 0.0, task: str = "causal_lm", data: str = "text") -> Experiment:
    return tiny_experiment(
        {"label_smoothing": label_smoothing}, task=task, model={"name": "gpt"}, data={"name": data}
    )


def task(label_smoothing: float = 0.0) -> CausalLM:
    return CausalLM(experiment(label_smoothing), TEXT)


def logits_and_targets(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 5, 7, generator=generator), torch.randint(7, (size, 5), generator=generator)


def sums(given: Batch, label_smoothing: float = 0.0) -> dict[str, float]:
    found = task(label_smoothing).sums(given.inputs, given)
    assert all(value.dtype == torch.float64 and value.shape == () for value in found.values())
    return {name: value.item() for name, value in found.items()}


def test_label_smoothing_is_torchs() -> None:
    logits, targets = logits_and_targets(3)
    found = task(0.1).loss(logits, batch(logits, targets))
    expected = functional.cross_entropy(logits.transpose(1, 2), targets, label_smoothing=0.1)
    torch.testing.assert_close(found, expected)


def test_sequences_that_only_fill_up_count_for_nothing_even_if_nan() -> None:
    logits, targets = logits_and_targets(4)
    valid = torch.tensor([True, False, True, False])
    spoiled = logits.clone()
    spoiled[~valid] = float("nan")
    assert sums(batch(spoiled, targets, valid)) == sums(batch(logits[valid], targets[valid]))


def test_ignored_tokens_count_for_nothing_in_an_evaluation() -> None:
    ignoring = CausalLM(experiment(), replace(TEXT, ignore_index=255))
    logits, targets = logits_and_targets(4)
    rest = targets.clone()
    rest[:, 3:] = 255
    found = ignoring.sums(logits, batch(logits, rest))
    expected = functional.cross_entropy(logits[:, :3].double().flatten(0, 1), targets[:, :3].flatten())
    assert found["count"] == 12
    assert found["correct"] == (logits.argmax(2) == targets)[:, :3].sum()
    assert found["loss"].item() / 12 == pytest.approx(expected.item(), rel=1e-6)
    nothing = ignoring.sums(logits, batch(logits, torch.full_like(targets, 255)))
    metrics = ignoring.metrics({name: value.item() for name, value in nothing.items()})
    assert metrics == {"loss": 0.0, "perplexity": 1.0, "accuracy": 0.0}


def test_batches_merge_to_the_metrics_of_the_whole() -> None:
    logits, targets = logits_and_targets(12)
    slices = (slice(0, 5), slice(5, 12))
    parts = [sums(batch(logits[part], targets[part]), label_smoothing=0.3) for part in slices]
    assert [part["count"] for part in parts] == [25, 35]
    metrics = task().metrics({name: sum(part[name] for part in parts) for name in parts[0]})
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    assert metrics.keys() == {"loss", "perplexity", "accuracy"}
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert metrics["accuracy"] == (logits.argmax(2) == targets).double().mean().item()


def test_an_infinite_loss_is_not_an_error() -> None:
    assert task().metrics({"loss": 1e6, "count": 1.0, "correct": 0.0})["perplexity"] == math.inf


def test_targets_are_tokens_of_the_vocabulary() -> None:
    spec = task().target_spec
    assert (spec.kind, spec.shape) == ("integer", (TEXT.sequence_length,))
    assert (spec.minimum, spec.maximum) == (0, TEXT.num_classes - 1)


def test_tasks_refuse_each_others_data() -> None:
    with pytest.raises(BadFileError, match=r"^task: causal_lm .*digits has images; write classification"):
        make_task(experiment(data="digits"), IMAGES)
    with pytest.raises(BadFileError, match=r"^task: classification .*write causal_lm"):
        make_task(experiment(task="classification"), TEXT)
