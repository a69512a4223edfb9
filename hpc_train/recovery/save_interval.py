"""The time between saves of ``checkpoint.every: auto``, from the run's own saves and interruptions. Pure.

Rank 0 computes it during the training, ``status`` explains it. The first-order optimum √(2·C·M) is from
J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; J. T. Daly,
FGCS 22(3), 2006, shows that it is close to the exact one as long as C is much less than M.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from hpc_train.console import rounded
from hpc_train.errors import counted
from hpc_train.recovery.budgets import COMES_BACK
from hpc_train.run.attempts import AttemptRecord
from hpc_train.run.file_shapes import decoded, encoded

#: Bounds, and the interval until a save and an interruption have been measured. Assumed.
_MIN_S, _MAX_S, _DEFAULT_S = 60.0, 3600.0, 600.0


@dataclass(frozen=True)
class SaveInterval:
    """The interval and the measurements that it follows from."""

    every_s: float = _DEFAULT_S
    #: Saves of the attempt, and the mean time that training waited for a save of the run (C), or None.
    saves: int = 0
    stall_s: float | None = None
    #: Interruptions of the run that lost work, and the mean training time between them (M), or None.
    interruptions: int = 0
    mtbf_s: float | None = None

    @classmethod
    def of(cls, measured: object) -> SaveInterval | None:
        """Return the ``save_interval`` of an attempt's record; None if it has none."""
        return decoded(cls, measured) if measured else None

    def to_json(self) -> dict[str, Any]:
        """Return it as ``save_interval`` of an attempt's record and of ``status --json``."""
        return {name: value for name, value in encoded(self).items() if value is not None}

    def __str__(self) -> str:
        """Return the explanation for ``status``."""
        reasons = []
        if self.stall_s is not None:
            reasons.append(f"a save stops training for C = {rounded(self.stall_s)} s")
        if self.mtbf_s is not None:
            lost = counted(self.interruptions, "interruption")
            reasons.append(f"{lost}, one per M = {self.mtbf_s / 3600:.2g} h of training")
        optimum = _optimum_s(self.stall_s, self.mtbf_s)
        if self.stall_s is not None and self.mtbf_s is None:
            reasons.append("no interruption so far")
        if optimum is None:
            is_default = self.every_s == _DEFAULT_S
            reasons.append("the default" if is_default else "Young's √(2·C·M) with the time so far as M")
        elif optimum != self.every_s:
            reasons.append(f"Young's √(2·C·M) is {rounded(optimum / 60)} min; bounds 1 and 60 min")
        else:
            reasons.append("Young's √(2·C·M)")
        return f"every {rounded(self.every_s / 60)} min (auto): {'; '.join(reasons)}"


def save_interval(
    earlier: Sequence[AttemptRecord], *, trained_s: float, saves: int, stall_s: float
) -> SaveInterval:
    """Return the interval for the attempt after ``earlier``, the run's other attempts.

    ``trained_s``: seconds since it began to train; ``saves``, ``stall_s``: its saves so far, and the total
    time that training waited for them. Without an interruption, the training time so far is a lower bound of
    the mean time between two, so the interval only becomes longer than the default.
    """
    measured = [(one, record) for record in earlier if (one := SaveInterval.of(record.save_interval))]
    num_saves = saves + sum(one.saves for one, _ in measured)
    waited_s = stall_s + sum(record.checkpoint_stall_s or 0.0 for _, record in measured)
    total_s = trained_s + sum(map(_trained_s, earlier))
    # A stop on request saves first.
    interruptions = sum(one.cause in COMES_BACK and "saved" not in one.events for one in earlier)
    mean_s = waited_s / num_saves if num_saves else None
    mtbf_s = total_s / interruptions if interruptions else None
    optimum = _optimum_s(mean_s, mtbf_s or total_s)
    every_s = _DEFAULT_S if optimum is None else optimum if mtbf_s else max(optimum, _DEFAULT_S)
    every_s = min(max(every_s, _MIN_S), _MAX_S)
    return SaveInterval(every_s, saves, mean_s, interruptions, mtbf_s)


def _optimum_s(stall_s: float | None, mtbf_s: float | None) -> float | None:
    return None if stall_s is None or mtbf_s is None else math.sqrt(2 * stall_s * mtbf_s)


def _trained_s(record: AttemptRecord) -> float:
    try:
        began = datetime.fromisoformat(record.events["first_step"])
        return max(0.0, (datetime.fromisoformat(record.end or "") - began).total_seconds())
    except (KeyError, ValueError):
        return 0.0
