# ruff: noqa: N803, N806  (shape suffixes)
"""Text that a language model writes at each evaluation: it continues the beginning of the validation data.

Every rank computes the same tokens by as many forward passes, since under FSDP and tensor parallelism a
forward is collective. Draws are a function of (seed, step, place), and no generator is read or seeded, so
training does not depend on it. Not under strategies with stages, of which no rank has the whole model.

Legend: T tokens of a sequence, V size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpc_train.config.schema import Experiment
from hpc_train.datasets.base import ArraySplit, DataSource
from hpc_train.datasets.random_numbers import Keys
from hpc_train.datasets.tokenization import decoder_of
from hpc_train.datasets.types import Batch, DataInfo
from hpc_train.tasks.base import Task
from hpc_train.tasks.causal_lm import CausalLM
from hpc_train.topology.strategy_traits import traits_of

FILE = "sample.txt"
#: The next token is drawn from the most probable ones.
_TOP_K = 40
#: Tokens of the validation data that the model continues, at most half a sequence.
_PROMPT_TOKENS = 16
_BETWEEN = "\n--- continued by the model: ---\n"


@dataclass(frozen=True)
class TextSamples:
    """Writes the text of one run's evaluations."""

    info: DataInfo
    seed: int
    prompt: tuple[int, ...]
    num_tokens: int

    @classmethod
    def of(cls, experiment: Experiment, source: DataSource, task: Task) -> TextSamples | None:
        """Return what writes samples; None where the file or the strategy has none."""
        length, count = source.info.sequence_length, experiment.evaluation.sample_tokens
        has_stages = traits_of(experiment.parallel.strategy).has_stages
        if not isinstance(task, CausalLM) or not isinstance(source.val, ArraySplit):
            return None
        if length is None or count == 0 or has_stages:
            return None
        first, _ = source.val.batch(torch.tensor([0]))
        assert isinstance(first, Tensor), "tokens"
        prompt = first[0, : max(1, min(_PROMPT_TOKENS, length // 2))].tolist()
        return cls(source.info, experiment.seed, tuple(prompt), count)

    def files(self, outputs: Callable[[Batch], Tensor], step: int) -> dict[str, bytes]:
        """Return the file of the evaluation at ``step``. ``outputs``: of a batch, logits (1, T, V)."""
        tokens = continued(outputs, self.prompt, self.num_tokens, self.info, self.seed, step)
        return {FILE: self._text(tokens).encode(errors="replace")}

    def _text(self, tokens: Sequence[int]) -> str:
        decoder = decoder_of(self.info)
        parts = self.prompt, tokens[len(self.prompt) :]
        texts = (" ".join(map(str, part)) if decoder is None else decoder.decode(part) for part in parts)
        return _BETWEEN.join(texts) + "\n"


def continued(
    outputs: Callable[[Batch], Tensor],
    prompt: Sequence[int],
    num_tokens: int,
    info: DataInfo,
    seed: int,
    step: int,
) -> list[int]:
    """Return the prompt and ``num_tokens`` tokens after it, by exactly as many calls of ``outputs``.

    Each is drawn from the 40 most probable tokens. The input is always of one shape, (1, T), so that
    compiled code is compiled once; what follows the last token changes nothing in a causal model.
    """
    length = info.sequence_length
    assert length is not None, "tokens"
    tokens = list(prompt)
    for place in range(num_tokens):
        window = tokens[-length:]
        inputs_1T = torch.tensor([window + [0] * (length - len(window))])
        valid = torch.ones(1, dtype=torch.bool)
        logits_V = outputs(Batch(step, place, 1.0, inputs_1T, inputs_1T, valid))[0, len(window) - 1]
        number = Keys(seed, step, torch.tensor([place])).uniform("text sample").item()
        # Of a padded vocabulary: a token that the data never have can't be decoded.
        tokens.append(drawn(logits_V[: info.num_classes], number))
    return tokens


def drawn(logits_V: Tensor, number: float) -> int:
    """Return the token that ``number``, in [0, 1), chooses among the most probable ones.

    Computed in float64 on the CPU, where order and rounding don't depend on the device.
    """
    values_K, tokens_K = logits_V.double().cpu().sort(descending=True, stable=True)
    ends_K = values_K[:_TOP_K].softmax(0).cumsum(0)
    place = int(torch.searchsorted(ends_K, number, right=True))
    return int(tokens_K[min(place, len(ends_K) - 1)])
