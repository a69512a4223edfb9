"""When a run is evaluated, saved and logged: functions of the step, so that a resumed run does the same."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.config.schema import CheckpointConfig, EvaluationConfig
from hpc_train.topology.batch_arithmetic import evaluation_interval, minutes_between_saves


@dataclass(frozen=True)
class Cadence:
    """The steps that are evaluated and saved. ``save_every_s`` is None if saves are due by steps."""

    total_steps: int
    evaluate_every: int
    save_every: int | None
    save_every_s: float | None

    @classmethod
    def of(
        cls,
        evaluation: EvaluationConfig,
        checkpoint: CheckpointConfig,
        total_steps: int,
        steps_per_epoch: int,
    ) -> Cadence:
        """Read it from the file."""
        minutes = minutes_between_saves(checkpoint)
        return cls(
            total_steps=total_steps,
            evaluate_every=evaluation_interval(evaluation, steps_per_epoch),
            save_every=checkpoint.every_steps,
            save_every_s=None if minutes is None else minutes * 60,
        )

    def evaluates(self, step: int) -> bool:
        """Return True if an evaluation follows ``step``; one always follows the last step."""
        return step > 0 and (step % self.evaluate_every == 0 or step == self.total_steps)

    def saves(self, step: int) -> bool:
        """Return True if ``step`` is saved regardless of time; the last step always is."""
        return step == self.total_steps or (self.save_every is not None and step % self.save_every == 0)
