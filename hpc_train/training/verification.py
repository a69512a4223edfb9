"""``recovery.verify_every_steps``: computes the gradients of a step on two ranks and compares them bitwise.

Every rank has a ``Verification``, an observer of its steps. In a step that is due, a rank first repeats
forward and backward of another rank's micro-batches: read again by index, with the same weights, buffers and
random numbers, and without communication. Then it trains its own micro-batches; their gradients are recorded
as they are computed, before ranks add them up. Ranks exchange the digests before the weights change, and
those of the state of which all have a copy; the state alone again after the last step. If two differ, all
ranks repeat both, a third rank repeats too, and the majority decides whose node computes wrongly. Nothing
that training reads changes, so a verified run is bitwise identical.

Legend: R ranks, S slots of a rank, P parameters, K = S · (1 + P) digests of a rank's step: the loss, then the
gradients of each of its micro-batches.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from hpc_train.errors import BadNodeError, HpcTrainError, PeerLostError, UnequalResultsError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.validate.compatibility import unverifiable_results
from hpc_train.run.checkpoints import committed, set_aside
from hpc_train.training.checkpoint.control_group import ControlGroup
from hpc_train.training.checkpoint.state import NamedTensors
from hpc_train.training.datasets.batches import TrainingBatches
from hpc_train.training.datasets.types import Batch
from hpc_train.training.forward import TrainingForward, TrainingSums
from hpc_train.training.rank import Rank
from hpc_train.training.resuming import Resumed
from hpc_train.training.state_digests import tensor_digest
from hpc_train.training.step import StepObserver, StepResult
from hpc_train.training.strategies.base import Forward
from hpc_train.training.strategies.buffers import Buffers
from hpc_train.training.strategies.ddp import DDPStrategy
from hpc_train.training.train_state import TrainState

#: Elements that are hashed at a time on a GPU: 8 MiB of int64 (assumed).
_CHUNK = 1 << 20
#: Odd, so that multiplication modulo 2^64 loses nothing (2^64 divided by the golden ratio, as int64).
_ODD = 0x9E37_79B9_7F4A_7C15 - (1 << 64)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIGN = 1 << 63


class WrongResultError(Exception):
    """Ranks have computed different numbers. Raised on all ranks; ``error`` is that of this rank.

    ``set_aside``: collective; sets the checkpoints aside that were not verified.
    """

    def __init__(self, error: HpcTrainError, set_aside: Callable[[], None]) -> None:
        super().__init__(str(error))
        self.error, self.set_aside = error, set_aside


class Verification(StepObserver):
    """Verifies one rank's steps."""

    def __init__(
        self,
        rank: Rank,
        state: TrainState,
        ranks: ControlGroup,
        training: TrainingBatches,
        steps: range,
        start: Resumed,
    ) -> None:
        """Collective. ``steps``: those of this attempt.

        Raises BadFileError if results on this device are not reproducible.
        """
        config, self._rank, self._ranks = rank.experiment, rank, ranks
        assert config.recovery.verify_every_steps is not None
        assert isinstance(state.strategy, DDPStrategy), "the rule recovery.verify refuses others"
        refuse_inexact(config, rank.device)
        #: Checkpoints up to this step have been computed by nodes that computed rightly then.
        self.verified = start.verified
        self._every, self._steps = config.recovery.verify_every_steps, steps
        self._strategy, self._training, self._state = state.strategy, training, state.state
        # Buffers and their EMA differ between ranks until they are shared.
        named = NamedTensors.of(state.model).tensors
        self._parameters = {name: value for name, value in named.items() if isinstance(value, nn.Parameter)}
        self._buffers = Buffers(state.model)
        self._recorder = _Recorder(state.model)
        facts = [json.loads(text) for text in ranks.texts(json.dumps([rank.node, start.hardware.processor]))]
        self._nodes = [str(node) for node, _ in facts]
        processors = {str(processor) for _, processor in facts}
        self._are_alike = len(processors) == 1 and len(set(start.hardware.threads)) == 1
        #: Rank r repeats the micro-batches of rank r + the first of these; after a difference, of both.
        self._distances = distances(self._nodes) if self._are_alike else [0]
        if not self._are_alike:
            difference = " and ".join(sorted(processors)) if len(processors) > 1 else "numbers of threads"
            rank.warn(
                f"recovery.verify_every_steps: ranks compute with different {difference}, so each repeats "
                "its own micro-batches: a node that computes the same wrong numbers twice is not noticed"
            )
        self._other: Tensor | None = None
        self._buffers_before: list[Tensor] = []
        self._factors: Tensor | None = None
        self._parts = itertools.count(1)

    def is_due(self, step: int) -> bool:
        """Return True if ``step`` is verified: those of the interval, the attempt's first, the run's last."""
        return step % self._every == 0 or step in (self._steps.start, self._steps.stop - 1)

    @override
    def step_begun(self, step: int, batches: Sequence[Batch], forward: Forward) -> None:
        if not self.is_due(step):
            return
        self._buffers_before, self._parts = self._buffers.copies(), itertools.count(1)
        self._factors = self._all_factors(batches)
        self._other = self._repeated(self._distances[0], step, forward)
        self._recorder.begin()

    @override
    def loss_computed(self, batch: Batch, loss: Tensor) -> None:
        if self._other is not None:
            self._recorder.loss_computed(batch, loss)

    @override
    def gradients_ready(self, step: int, batches: Sequence[Batch], forward: Forward) -> None:
        if self._other is None:
            return
        trained, other, self._other = self._recorder.end(batches), self._other, None
        rows = self._exchanged([_bits_digest(trained), _bits_digest(other), self._state_digest()])
        computed = self._votes(rows)
        if all(len({digest for _, digest in votes}) <= 1 for votes in computed):
            self.verified = step
            return
        self._buffers.put_back(self._buffers_before)
        again = [_bits_digest(self._repeated(distance, step, forward)) for distance in [0, *self._distances]]
        repeated = self._votes(self._exchanged(again), is_repeated=True)
        wrong = set().union(*(wrong_ranks([*a, *b]) for a, b in zip(computed, repeated, strict=True)))
        raise WrongResultError(self._error(wrong, step + 1, self._described(trained, other)), self._set_aside)

    @override
    def step_done(self, step: int, batches: Sequence[Batch], result: StepResult) -> None:
        """Compare the state after the last step, which no other step reads."""
        if step != self._steps.stop - 1 or not self._are_alike:
            return
        rows = self._exchanged([self._state_digest()])
        if wrong := wrong_ranks([(rank, digest) for rank, (digest,) in enumerate(rows)]):
            error = self._error(wrong, step + 1, "the weights or the optimizer's state after it")
            raise WrongResultError(error, self._set_aside)
        self.verified = step + 1

    def _state_digest(self) -> Tensor:
        """Return the digest of weights, their EMA and optimizer state, but not of slices of single ranks."""
        state, averages = self._state.optimizer.state, self._state.averages
        values = [
            *self._parameters.values(),
            *(averages[name] for name in self._parameters if name in averages),
            *(value for of_parameter in state.values() for value in of_parameter.values()),
        ]
        copies = [value for value in values if isinstance(value, Tensor) and not isinstance(value, DTensor)]
        return _bits_digest(torch.stack([_bits_digest(value).to(self._rank.device) for value in copies]))

    def _repeated(self, distance: int, step: int, forward: Forward) -> Tensor:
        """Return the digests of the micro-batches of the rank at this distance, shape (K,)."""
        batches = self._training.of_rank((self._rank.facts.rank + distance) % len(self._nodes), step)
        if (factors := self._factors) is not None:
            batches = [replace(batch, loss_factor=factors[batch.number]) for batch in batches]
        assert isinstance(forward, TrainingForward)

        def on_begin(batch: Batch) -> None:
            self._rank.progress.at("verifying", step, next(self._parts))

        silent = replace(
            forward,
            on_begin=on_begin,
            on_end=lambda: None,
            on_loss=self._recorder.loss_computed,
            training_sums=TrainingSums(),
        )
        self._recorder.begin()
        self._strategy.compute_alone(batches, silent)
        for batch in batches:  # all ranks report the same progress
            if batch.weight == 0:
                on_begin(batch)
        return self._recorder.end(batches)

    def _all_factors(self, batches: Sequence[Batch]) -> Tensor | None:
        """Return the loss factors of the step's micro-batches by number, if the task has a ``weight``.

        They are taken from their ranks: added up in another order, the step's weight might round otherwise.
        """
        if all(batch.loss_factor is None for batch in batches):
            return None
        factors = torch.zeros(
            self._training.sampler.micro_batches, dtype=torch.float64, device=self._rank.device
        )
        for batch in batches:
            if batch.loss_factor is not None:
                factors[batch.number] = batch.loss_factor
        dist.all_reduce(factors)
        return factors

    def _exchanged(self, digests: Sequence[Tensor]) -> list[list[Any]]:
        """Return the digests of all ranks, tensors of one shape, by rank. Collective; waits for them."""
        row = torch.stack(list(digests))
        table = row.new_zeros((len(self._nodes), *row.shape))
        table[self._rank.facts.rank] = row
        if len(self._nodes) > 1:
            dist.all_reduce(table)
        rows: list[list[Any]] = table.tolist()
        return rows

    def _votes(
        self, rows: Sequence[Sequence[int]], *, is_repeated: bool = False
    ) -> list[list[tuple[int, int]]]:
        """Return for each rank the (rank, digest) of all that computed its micro-batches; last the state.

        ``rows``: by rank, the digests of its own micro-batches and of those at each distance; then the
        state's, unless it ``is_repeated``.
        """
        num_ranks = len(rows)
        used = self._distances if is_repeated else self._distances[:1]
        votes = [[(rank, row[0])] for rank, row in enumerate(rows)]
        for place, distance in enumerate(used, 1):
            for rank, row in enumerate(rows):
                votes[(rank + distance) % num_ranks].append((rank, row[place]))
        compares = self._are_alike and not is_repeated
        return [*votes, [(rank, row[-1]) for rank, row in enumerate(rows)] if compares else []]

    def _described(self, trained: Tensor, other: Tensor) -> str:
        """Return the first number that ranks computed differently. Collective."""
        rows = self._exchanged([trained, other])
        for rank, (_, repeated) in enumerate(rows):
            owner = (rank + self._distances[0]) % len(rows)
            pairs = enumerate(zip(rows[owner][0], repeated, strict=True))
            differing = [divmod(place, len(self._recorder.names)) for place, (a, b) in pairs if a != b]
            for slot in sorted({slot for slot, _ in differing}):
                places = [place for at, place in differing if at == slot]
                batch = f"micro-batch {owner + slot * len(rows)}"
                if 0 in places:
                    return f"the loss of {batch}"
                return f"the gradient of {self._recorder.names[places[-1]]} in {batch}"
        return "the weights or the optimizer's state before it"

    def _error(self, wrong: set[int], step: int, description: str) -> HpcTrainError:
        """Return this rank's error for the ranks that may be wrong."""
        listed = ", ".join(map(str, sorted(wrong)))
        name = f"rank{'s' * (len(wrong) > 1)} {listed}"
        key = "recovery.verify_every_steps"
        if len({self._nodes[rank] for rank in wrong}) == 1:
            kind: type[HpcTrainError] = BadNodeError
            message = f"{name} computed wrong numbers in step {step}: {description} ({key})"
        else:
            kind = UnequalResultsError
            message = (
                f"{name} compute different numbers in step {step}: {description}; which of them are wrong is "
                f"unknown ({key})"
            )
        return kind(message) if self._rank.facts.rank in wrong else PeerLostError(message)

    def _set_aside(self) -> None:
        """Set the checkpoints aside that are newer than the last verified step. Collective, after saves."""

        def on_rank_0() -> None:
            if self._rank.is_first:
                why = f"a node computed wrongly, and steps after {self.verified} are not verified"
                for checkpoint in committed(self._rank.paths, self._rank.attempt):
                    if checkpoint.step > self.verified and set_aside(checkpoint, why, "unverified"):
                        self._rank.warn(f"checkpoint {checkpoint.folder.name} is set aside: {why}")

        self._ranks.together(on_rank_0)


def refuse_inexact(config: Experiment, device: torch.device) -> None:
    """Raise BadFileError if a step does not repeat bitwise on the device."""
    if problem := unverifiable_results(config, is_on_gpu=device.type == "cuda"):
        raise problem.as_error()


class _Recorder:
    """Records the digests of losses, and of the gradients that each backward computes, before they are
    reduced or accumulated.
    """

    def __init__(self, model: nn.Module) -> None:
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.names = ["loss", *trained]
        self._parameters = list(trained.values())
        #: A node of autograd lives as long as a reference to it, and so do its hooks.
        self._hooks: list[tuple[Any, Any]] = []
        self._rows: dict[int, list[Tensor | None]] = {}
        self._row: list[Tensor | None] = []

    def begin(self) -> None:
        """Register the hooks."""
        self._rows = {}
        for place, parameter in enumerate(self._parameters, 1):
            node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
            self._hooks.append((node, node.register_prehook(partial(self._note, place))))

    def loss_computed(self, batch: Batch, loss: Tensor) -> None:
        """Begin a micro-batch; one that runs again, such as DDP's rehearsal, replaces the former."""
        self._row = [None] * len(self.names)
        if batch.weight > 0:
            self._row[0] = loss.detach().to(torch.float64).view(torch.int64)
            self._rows[batch.number] = self._row

    def _note(self, place: int, gradients: Sequence[Tensor | None]) -> None:
        if gradients[0] is not None:
            digest, former = _bits_digest(gradients[0]), self._row[place]
            self._row[place] = digest if former is None else former * _ODD + digest

    def end(self, batches: Sequence[Batch]) -> Tensor:
        """Remove the hooks; return the digests, shape (K,), 0 for what was not computed."""
        for _, hook in self._hooks:
            hook.remove()
        self._hooks = []
        zero = torch.zeros((), dtype=torch.int64, device=self._parameters[0].device)
        nothing: list[Tensor | None] = [None] * len(self.names)
        rows = [self._rows.get(batch.number, nothing) if batch.weight > 0 else nothing for batch in batches]
        return torch.stack([zero if value is None else value for row in rows for value in row])


def distances(nodes: Sequence[str]) -> list[int]:
    """Return the distances, at most two, of the ranks that repeat a rank's work; 0 for a single rank.

    ``nodes``: by rank. Other nodes come first, and a node that is not that of the first.
    """
    num_ranks, chosen = len(nodes), [0]
    candidates = range(1, min(num_ranks, 2 * max(Counter(nodes).values()) + 2))

    def num_shared(distance: int) -> int:
        return sum(
            nodes[rank - distance] in {nodes[rank - former] for former in chosen} for rank in range(num_ranks)
        )

    while len(chosen) < min(3, num_ranks):
        chosen.append(min((one for one in candidates if one not in chosen), key=num_shared))
    return chosen[1:] or [0]


def wrong_ranks(votes: Sequence[tuple[int, int]]) -> set[int]:
    """Return the ranks whose digest is not that of the majority; all of them without a majority.

    ``votes``: (rank, digest) of all computations of the same numbers.
    """
    counts = Counter(digest for _, digest in votes)
    majority = {digest for digest, count in counts.items() if 2 * count > len(votes)}
    return {rank for rank, digest in votes if digest not in majority}


def _bits_digest(tensor: Tensor) -> Tensor:
    """Return a digest of the tensor's bits, shape (), int64, on its device; a GPU is not waited for."""
    if tensor.device.type == "cpu":
        return torch.tensor(int(tensor_digest([tensor]), 16) - _SIGN)
    return sum_digest(tensor)


def sum_digest(tensor: Tensor) -> Tensor:
    """Return the sum of the elements' bits, each multiplied by an odd number and mixed, modulo 2^64.

    A change of a single element always changes it.
    """
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    bits = dense.contiguous().view(-1).view(_INTEGERS[dense.element_size()])
    digest = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in bits.split(_CHUNK):
        mixed = part.to(torch.int64) * _odd_numbers(tensor.device)[: len(part)]
        digest = digest * _ODD + (mixed ^ (mixed >> 32)).sum()
    return digest


@lru_cache(maxsize=1)
def _odd_numbers(device: torch.device) -> Tensor:
    return (torch.arange(_CHUNK, dtype=torch.int64, device=device) * 2 + 1) * _ODD
