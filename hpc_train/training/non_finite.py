"""Handles losses and gradients that are NaN or infinite (``on_non_finite``), or spikes (``on_spike``).

``training.build`` creates one ``Guard`` on every rank. Under ``stop`` nothing waits for the device; ``skip``
and ``rollback`` need the result before the weights change, so they wait for the device once per step, in one
exchange for both keys. Under ``on_spike: report`` rank 0 looks at the digests of steps when they arrive.
"""

from __future__ import annotations

import logging
import math
import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.errors import FINITE_REMEDY, NonFiniteError, counted
from hpc_train.experiment.config.training_sections import OptimizationConfig
from hpc_train.paths import RunPaths
from hpc_train.run.digests import DigestWriter, StepDigest
from hpc_train.run.spikes import Reaction, Spike, SpikeRule, SpikesFile, rule_at
from hpc_train.training.checkpoint.control_group import ControlGroup
from hpc_train.training.datasets.sampler import Position
from hpc_train.training.distributed.device import HostCopy
from hpc_train.training.strategies.buffers import Buffers

_log = logging.getLogger(__name__)


class RollbackError(Exception):
    """All ranks go back to the newest checkpoint and skip the data of ``step``.

    ``training.build`` catches it.
    """

    def __init__(self, step: int, spike: Spike | None = None) -> None:
        cause = "NaN or infinite" if spike is None else f"a spike ({spike})"
        super().__init__(f"step {step + 1} has a loss or gradient that is {cause}")
        self.step = step


class FiniteWatch:
    """Records whether any number passed to ``look`` is NaN or infinite, without waiting for the device."""

    def __init__(self) -> None:
        self._has_seen = False
        self._under_way: deque[HostCopy] = deque()

    def look(self, number: Tensor) -> None:
        """Add a number, shape ()."""
        if number.is_cpu:
            self._has_seen |= not math.isfinite(number.item())
        else:
            self._under_way.append(HostCopy(number.isfinite()))

    @property
    def has_seen(self) -> bool:
        """True if a number that has reached the host is not finite."""
        while self._under_way and self._under_way[0].is_ready:
            self._has_seen |= not self._under_way.popleft().tensors()[0].item()
        return self._has_seen


class Guard:
    """Checks one rank's steps. ``skips``: number of steps that the run has skipped, in earlier attempts too.

    ``norm_counts``: also check the gradients' norm; under fp16 the loss scale handles infinite gradients.
    """

    def __init__(
        self,
        config: OptimizationConfig,
        model: nn.Module,
        *,
        norm_counts: bool,
        skips: int = 0,
        rule: SpikeRule | None = None,
        record: Callable[[Spike, Reaction], Spike] = lambda spike, reaction: spike,
    ) -> None:
        """``rule``: the same on all ranks; None if spikes change nothing. ``record`` receives each spike."""
        self.policy = config.on_non_finite
        self.skips = skips
        #: How the step that ``allows`` refused last is handled, and the spike, if it was one.
        self.reaction: Literal["skip", "rollback"] = "skip"
        self.spike: Spike | None = None
        self._on_spike = config.on_spike
        self._rule, self._record = rule, record
        self._most = config.max_non_finite
        self._norm_counts = norm_counts
        self._watch = FiniteWatch()
        # A forward with NaN also corrupts BatchNorm's statistics.
        self._buffers = Buffers(model) if "skip" in (self.policy, self._on_spike) else None
        self._kept: list[Tensor] = []

    @property
    def needs_norm(self) -> bool:
        """True if the gradients' norm is checked, clipped or not."""
        return (self.policy != "stop" and self._norm_counts) or self._on_spike is not None

    @property
    def has_seen(self) -> bool:
        """True if this rank has had a loss that is not finite. Under ``stop`` only."""
        return self._watch.has_seen

    def before_step(self) -> None:
        """Copy the buffers under ``skip``, so that ``after_skip`` can restore them."""
        if self._buffers is not None:
            self._kept = self._buffers.copies()

    def allows(self, loss: Tensor, norm: Tensor | None, step: int = 0) -> bool:
        """Return True if the gradients of ``step`` may change the weights; the same on all ranks.

        ``loss``: this rank's part, shape (); ``norm``: the gradients' norm, the same on all ranks. Under
        ``skip`` and ``rollback`` it is collective and waits for the device.
        """
        if self._rule is not None:
            return self._judged(self._rule, loss, norm, step)
        self.spike = None
        if self.policy == "stop":
            self._watch.look(loss)
            return True
        numbers = [loss.isfinite()]
        if norm is not None and self._norm_counts:
            numbers.append(norm.isfinite())
        are_finite = torch.stack(numbers).all().to(torch.int32)
        dist.all_reduce(are_finite, op=dist.ReduceOp.MIN)
        self._react_as(self.policy)
        return bool(are_finite.item())

    def _react_as(self, key: str) -> None:
        self.reaction = "rollback" if key == "rollback" else "skip"

    def _judged(self, rule: SpikeRule, loss: Tensor, norm: Tensor | None, step: int) -> bool:
        """Return False for a spike, and unless ``on_non_finite`` is ``stop``, for NaN or infinity."""
        losses = loss.new_zeros(dist.get_world_size(), dtype=torch.float64)
        losses[dist.get_rank()] = loss
        dist.all_reduce(losses)
        norms = [] if norm is None else [norm.to(torch.float64).view(1)]
        *of_ranks, last = torch.cat([losses, *(norms or [losses.new_zeros(1)])]).tolist()
        grad_norm = last if norms else None
        # In the order of the ranks, like the digests, from which a resumed run takes the window; Python's own
        # ``sum`` compensates for rounding.
        total = reduce(operator.add, of_ranks, 0.0)
        self.spike = rule.judge(step + 1, total, grad_norm)
        is_finite = math.isfinite(total) and (
            grad_norm is None or not self._norm_counts or math.isfinite(last)
        )
        if self.policy == "stop":
            self._watch.look(loss)
        elif not is_finite:
            self._react_as(self.policy)
            self.spike = None
            return False
        if self.spike is None:
            return True
        self._react_as(str(self._on_spike))
        self.spike = self._record(self.spike, self.reaction)
        return False

    def after_skip(self, step: int) -> None:
        """Restore the buffers after a step that ``allows`` refused; count it unless it was a spike.

        Raises NonFiniteError above the maximum.
        """
        if self._buffers is not None:
            self._buffers.put_back(self._kept)
        if self.spike is not None:
            return
        self.skips += 1
        if self.skips > self._most:
            raise NonFiniteError(
                f"a loss or gradient is NaN or infinite at step {step}, {counted(self.skips, 'time')} "
                f"so far; optimization.max_non_finite allows {self._most}: {FINITE_REMEDY}",
                step=step,
            )

    def clip(self, clip_gradients: Callable[[float], Tensor], max_norm: float | None) -> Tensor | None:
        """Clip if ``max_norm`` is set; return the norm if it is clipped or checked."""
        if max_norm is None and not self.needs_norm:
            return None
        return clip_gradients(math.inf if max_norm is None else max_norm)


@dataclass(frozen=True)
class SpikeRecorder:
    """Rank 0's record of spikes and their samples; passes digests on to the run's file of them.

    ``rule``: finds spikes among the digests; None: the guard finds them. ``samples``: of a step.
    """

    file: SpikesFile
    digests: DigestWriter[StepDigest]
    samples: Callable[[int], list[int]]
    rule: SpikeRule | None

    def append(self, digests: Sequence[StepDigest]) -> None:
        """Write the digests of consecutive steps."""
        self.digests.append(digests)
        for digest in digests if self.rule is not None else ():
            assert self.rule is not None
            if spike := self.rule.judge(digest.step, digest.loss, digest.grad_norm):
                self.record(spike, "report")

    def record(self, spike: Spike, reaction: Reaction) -> Spike:
        """Write the spike and log it; return it with its samples."""
        whole = self.file.append(spike, self.samples(spike.step - 1), reaction)
        _log.warning("spike: %s", whole)
        return whole

    def sync(self) -> None:
        """Sync what is written to the disk. Any thread."""
        self.digests.sync()
        self.file.sync()


def spike_rule(
    config: OptimizationConfig, paths: RunPaths, position: Position, ranks: ControlGroup
) -> tuple[SpikeRule | None, bool]:
    """Return the rule of ``on_spike`` at a position, and whether spikes change the training. Collective.

    Rank 0 reads the digests. Once as many windows are skipped as the file allows, spikes are only recorded.
    """
    if config.on_spike is None:
        return None, False
    rule = rule_at(paths, position.step) if ranks.rank == 0 else SpikeRule()
    is_over = config.on_spike == "rollback" and len(position.skipped) >= config.max_non_finite
    return SpikeRule.of_bits(ranks.broadcast(rule.to_bits())), config.on_spike != "report" and not is_over


class NoGuard(Guard):
    """Allows every step; not collective. For a step on a sample, and for one without data."""

    def before_step(self) -> None:
        """Do nothing."""

    def allows(self, loss: Tensor, norm: Tensor | None, step: int = 0) -> bool:
        """Return True."""
        return True


def seen_error(step: int) -> NonFiniteError:
    """Return the error that all ranks raise under ``stop`` once a rank has had such a loss."""
    return NonFiniteError(
        f"the train loss is NaN or infinite on a rank, at step {step} or just before; {FINITE_REMEDY}",
        step=step,
    )


def check_evaluation(step: int, metrics: dict[str, float]) -> None:
    """Raise NonFiniteError if the validation loss is not finite; ``metrics`` are the same on all ranks."""
    loss = metrics.get("loss", 0.0)
    if not math.isfinite(loss):
        raise NonFiniteError(f"the val loss is {loss} at step {step}; {FINITE_REMEDY}")


def check_rollbacks(skipped: tuple[int, ...], config: OptimizationConfig, step: int | None = None) -> None:
    """Raise NonFiniteError if more windows are skipped than the file allows. ``step``: of the last one."""
    if len(skipped) > config.max_non_finite:
        raise NonFiniteError(
            f"a loss or gradient was NaN, infinite or a spike {counted(len(skipped), 'time')}; "
            f"optimization.max_non_finite allows {config.max_non_finite} rollbacks: {FINITE_REMEDY}",
            step=step,
        )
