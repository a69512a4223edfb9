"""Spikes of the loss and of the gradients' norm: the rule (``optimization.on_spike``), and ``spikes.jsonl``.

The rule is that of Iglewicz and Hoaglin (1993, "How to detect and handle outliers"), on one side: a number
is an outlier if it exceeds the median of a window by more than ``SCORE`` times its scale, 1.4826 times the
median absolute deviation (MAD), which is the standard deviation if numbers are normal. The window has the
last ``WINDOW`` finite numbers before the step, spikes included: the median bears them, and after a lasting
change, such as other data, half a window of steps is flagged at most. Losses and norms are compared by
their logarithms, since their noise is in proportion to them; losses as they are if one of the window is not
positive. A step is a spike if either is an outlier.

Training decides and writes the file; commands read it, without torch.
"""

from __future__ import annotations

import json
import math
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median_high
from typing import BinaryIO, Literal

from typing_extensions import override

from hpc_train.errors import counted
from hpc_train.paths import RunPaths
from hpc_train.run.digests import StepDigest, read_digests
from hpc_train.run.file_shapes import Count, decoded
from hpc_train.run.files import UnreadableFileError, open_regular
from hpc_train.run.growing_file import GrowingFile

#: Steps of the window, and the steps of the run before the first decision (assumed).
WINDOW, WARM_UP = 128, 64
#: Measured by ``benchmarks/spikes.py``: false alarms of the recipes by score.
SCORE = 5.0
#: Minimum scale of logarithms, or of a loss as a share of its median.
_MIN_SCALE = 0.01
_MAD_TO_DEVIATION = 1.4826
#: Of the largest number.
_MAX_EXPONENT = 709.0
#: Steps that are read to fill the window: more than its size, since numbers that are not finite are omitted.
_READ_STEPS = 16 * WINDOW
_MAX_SAMPLES = 1024
#: In messages: spikes, and samples of each.
_SHOWN, _SHOWN_SAMPLES = 3, 8
Reaction = Literal["report", "skip", "rollback"]
_DONE = {"report": ", recorded", "skip": ", update skipped", "rollback": ", rolled back"}


@dataclass(frozen=True)
class Spike:
    """A line of ``spikes.jsonl``. ``limit``: the number above which the step is a spike."""

    step: Count
    #: None: not finite, or not computed; a limit: there are too few numbers before.
    loss: float | None
    loss_limit: float | None = None
    grad_norm: float | None = None
    grad_norm_limit: float | None = None
    #: The first indices of the samples in the training split, and the number of all.
    samples: list[int] = field(default_factory=list)
    num_samples: Count = 0
    reaction: Reaction = "report"

    def __str__(self) -> str:
        pairs = {"loss": (self.loss, self.loss_limit), "grad_norm": (self.grad_norm, self.grad_norm_limit)}
        numbers = [
            f"{name} {value:.4g} above {limit:.4g}"
            for name, (value, limit) in pairs.items()
            if value is not None and limit is not None and value > limit
        ]
        listed = ", ".join(map(str, self.samples[:_SHOWN_SAMPLES]))
        more = ", …" if self.num_samples > _SHOWN_SAMPLES else ""
        return f"step {self.step}: {' and '.join(numbers)}{_DONE[self.reaction]} (samples {listed}{more})"


class SpikeRule:
    """Decides step by step; the same on all ranks, which pass it the same numbers."""

    def __init__(self, score: float = SCORE) -> None:
        self._score = score
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)

    @classmethod
    def of_bits(cls, bits: Sequence[int]) -> SpikeRule:
        """Return the rule with the result of ``to_bits`` of another one."""
        rule, count = cls(), len(bits) - 1
        numbers = struct.unpack(f"{count}d", struct.pack(f"{count}q", *bits[1:]))
        rule._losses.extend(numbers[: bits[0]])
        rule._norms.extend(numbers[bits[0] :])
        return rule

    def to_bits(self) -> list[int]:
        """Return the window as integers, which ranks exchange."""
        numbers = [*self._losses, *self._norms]
        return [
            len(self._losses),
            *struct.unpack(f"{len(numbers)}q", struct.pack(f"{len(numbers)}d", *numbers)),
        ]

    @classmethod
    def after(cls, digests: Iterable[StepDigest]) -> SpikeRule:
        """Return the rule after the steps of a run."""
        rule = cls()
        for digest in digests:
            rule.add(digest.loss, digest.grad_norm)
        return rule

    def judge(self, step: int, loss: float, grad_norm: float | None) -> Spike | None:
        """Return the spike, without samples, if the step is one; add its numbers to the window."""
        spike = self._judged(step, loss, grad_norm)
        self.add(loss, grad_norm)
        return spike

    def _judged(self, step: int, loss: float, grad_norm: float | None) -> Spike | None:
        loss_limit = norm_limit = None
        if math.isfinite(loss) and len(self._losses) >= WARM_UP:
            loss_limit = self._limit(self._losses, loss)
        if grad_norm is not None and not 0 < grad_norm < math.inf:
            grad_norm = None
        if grad_norm is not None and len(self._norms) >= WARM_UP:
            norm_limit = self._limit(self._norms, grad_norm)
        is_loss = loss_limit is not None and loss > loss_limit
        if not is_loss and (grad_norm is None or norm_limit is None or grad_norm <= norm_limit):
            return None
        return Spike(step, loss if math.isfinite(loss) else None, loss_limit, grad_norm, norm_limit)

    def add(self, loss: float, grad_norm: float | None) -> None:
        """Add a step's numbers to the window."""
        if math.isfinite(loss):
            self._losses.append(loss)
        if grad_norm is not None and 0 < grad_norm < math.inf:
            self._norms.append(grad_norm)

    def _limit(self, window: deque[float], value: float) -> float | None:
        """Return the number above which ``value`` is an outlier; None if it would be infinite."""
        is_positive = value > 0 and min(window) > 0
        values = [math.log(number) for number in window] if is_positive else list(window)
        middle = median_high(values)
        deviation = median_high([abs(number - middle) for number in values])
        minimum = _MIN_SCALE * (1.0 if is_positive else abs(middle))
        limit = middle + self._score * max(_MAD_TO_DEVIATION * deviation, minimum)
        if not is_positive:
            return limit
        return math.exp(limit) if limit < _MAX_EXPONENT else None


def rule_at(paths: RunPaths, step: int) -> SpikeRule:
    """Return the rule after ``step`` steps of a run, by its digests, which a checkpoint has synced."""
    return SpikeRule.after(read_digests(paths.digests, max(1, step - _READ_STEPS), step) if step else ())


class SpikesFile(GrowingFile):
    """The spikes up to the step from which this attempt continues, followed by this attempt's spikes.

    Spikes whose data the run skips (``rollback``) are kept, since it does not meet them again.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        self._resumed_step = resumed_step
        self._rolled_back: set[bytes] = set()
        super().__init__(path)

    @override
    def copy_kept(self, old: BinaryIO, new: BinaryIO) -> None:
        self._rolled_back.clear()
        for line in old:
            spike = _parsed(line)
            if spike is not None and spike.reaction == "rollback":
                self._rolled_back.add(line)
            elif spike is None or spike.step > self._resumed_step:
                continue
            new.write(line)

    def append(self, spike: Spike, samples: Sequence[int], reaction: Reaction) -> Spike:
        """Write a spike, with its samples, to the operating system; return what was written."""
        whole = replace(
            spike, samples=list(samples[:_MAX_SAMPLES]), num_samples=len(samples), reaction=reaction
        )
        line = json.dumps(asdict(whole), allow_nan=False).encode() + b"\n"
        if line not in self._rolled_back:  # an attempt that ended before its next save meets it again
            self.write(line)
        return whole


def read_spikes(paths: RunPaths) -> Iterator[Spike]:
    """Yield the run's spikes in order; lines that can't be read are omitted."""
    with suppress(FileNotFoundError, UnreadableFileError), open_regular(paths.spikes) as file:
        for line in file:
            if (spike := _parsed(line)) is not None:
                yield spike


def _parsed(line: bytes) -> Spike | None:
    with suppress(ValueError, RecursionError):
        return decoded(Spike, json.loads(line))
    return None


def in_words(paths: RunPaths) -> str | None:
    """Return the newest spikes of the run, and their number; None without one."""
    spikes = list(read_spikes(paths))
    if not spikes:
        return None
    newest = "; ".join(map(str, spikes[: -_SHOWN - 1 : -1]))
    return (
        f"{counted(len(spikes), 'spike')}: {newest}; hpc-train replay {paths.folder.name} --step N shows one"
    )
