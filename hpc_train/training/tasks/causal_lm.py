"""``task: causal_lm``: predict the next token at each position of a sequence, with cross entropy.

Legend: B sequences, T tokens of a sequence, V size of the vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from hpc_train.experiment.config.schema import Experiment
from hpc_train.training.datasets.types import Batch, DataInfo, TargetSpec
from hpc_train.training.tasks.base import Task, checked_logits, divided


class CausalLM(Task):
    """Logits (B, T, V) against the tokens that follow, (B, T) int64; ``DataInfo.ignore_index`` is ignored."""

    def __init__(self, experiment: Experiment, info: DataInfo) -> None:
        assert info.sequence_length is not None, "make_task has refused other data"
        num_tokens = experiment.model.args.get("num_classes") or info.num_classes
        self._num_tokens = num_tokens
        self.target_spec = TargetSpec(
            "the next token at each place",
            kind="integer",
            shape=(info.sequence_length,),
            minimum=0,
            maximum=num_tokens - 1,
            ignored=info.ignore_index,
        )
        self._ignored = info.ignore_index
        #: See ``Task``.
        self.weight = None if self._ignored is None else self._num_predicted
        self._label_smoothing = experiment.optimization.label_smoothing

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the mean cross entropy over the tokens of the micro-batch, with label smoothing.

        Ignored tokens don't count; 0 if all are ignored.
        """
        logits, targets = self._flat(outputs, batch.targets)
        if self._ignored is None:
            return functional.cross_entropy(logits, targets, label_smoothing=self._label_smoothing)
        losses = self._losses(logits, targets, self._label_smoothing)
        return divided(losses.sum(), self._num_predicted(batch))

    def _num_predicted(self, batch: Batch) -> Tensor:
        """Return the number of tokens that are not ignored."""
        return (batch.targets != self._ignored).sum()

    def _losses(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the cross entropy of each token, (B·T,); 0 for ignored tokens."""
        ignored = -100 if self._ignored is None else self._ignored  # torch's default, which is no token
        return functional.cross_entropy(
            logits, targets, ignore_index=ignored, label_smoothing=smoothing, reduction="none"
        )

    def _flat(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (B·T, V), at least float32, and targets (B·T,).

        Flattened because CUDA's cross entropy over (B, V, T) has no deterministic implementation.
        """
        logits = checked_logits(outputs, "B, T, C", self._num_tokens)
        return logits.flatten(0, 1), targets.flatten()

    def sums(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return ``count`` (of tokens), and the sums ``loss`` (without smoothing) and ``correct``."""
        logits, targets = self._flat(outputs, batch.targets)
        losses = self._losses(logits, targets)
        valid = batch.valid.repeat_interleave(batch.targets.shape[1])
        if self._ignored is not None:
            valid = valid & (targets != self._ignored)
        # No product with ``valid``: the values of a padding sequence may be NaN.
        sums = {
            "count": valid,
            "loss": torch.where(valid, losses, torch.zeros_like(losses)),
            "correct": (logits.argmax(dim=1) == targets) & valid,
        }
        return {name: values.sum(dtype=torch.float64) for name, values in sums.items()}

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return means over the validation data's tokens; ``perplexity`` is exp(loss)."""
        count = sums["count"] or 1.0  # if all tokens are ignored
        loss = sums["loss"] / count
        return {"loss": loss, "perplexity": _exp(loss), "accuracy": sums["correct"] / count}


def _exp(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
