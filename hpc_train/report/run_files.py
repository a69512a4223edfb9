"""A run's files for ``status`` and ``compare``: ``run.json`` and its attempts' records, read once each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hpc_train.errors import HpcTrainError
from hpc_train.paths import AttemptPaths, RunPaths
from hpc_train.run.attempts import AttemptRecord, read_record
from hpc_train.run.run_facts import run_facts

if TYPE_CHECKING:
    from hpc_train.config.schema import Experiment
    from hpc_train.run.run_status import RunStatus


@dataclass(frozen=True)
class RunFiles:
    """A run as its files were when they were read."""

    paths: RunPaths
    #: ``run.json``; empty if it can't be read.
    facts: Mapping[str, Any]
    #: In order of attempts; None: a record that can't be read.
    attempts: list[tuple[AttemptPaths, AttemptRecord | None]]

    @classmethod
    def read(cls, paths: RunPaths, *, with_events: bool = True) -> RunFiles:
        """Read the files; ``with_events``: see ``read_record``."""
        attempts = [
            (attempt, read_record(attempt, with_events=with_events)) for attempt in paths.attempt_folders()
        ]
        return cls(paths, run_facts(paths), attempts)

    @cached_property
    def experiment(self) -> Experiment | None:
        """The experiment of the newest attempt or, before the first, the planned one.

        None for a damaged file, which other commands report.
        """
        from hpc_train.run import frozen_experiment  # the schema: 0.2 s, which few runs need
        from hpc_train.run.create import effective_experiment

        try:
            if not self.facts.get("changes"):
                return frozen_experiment.read(self.paths)
            return effective_experiment(self.paths, max(1, self.newest_number))
        except (HpcTrainError, OSError):
            return None

    @property
    def recorded(self) -> list[tuple[AttemptPaths, AttemptRecord]]:
        """The attempts with a readable record."""
        return [(attempt, record) for attempt, record in self.attempts if record is not None]

    @property
    def records(self) -> list[AttemptRecord]:
        """The readable records, in order of attempts."""
        return [record for _, record in self.attempts if record is not None]

    @property
    def newest_number(self) -> int:
        """The number of the newest attempt, 0 before the first."""
        return self.attempts[-1][0].number if self.attempts else 0

    @property
    def newest_record(self) -> AttemptRecord | None:
        """The record of the newest attempt; None before the first, or if it can't be read."""
        return self.attempts[-1][1] if self.attempts else None

    def is_running(self, record: AttemptRecord, now: RunStatus) -> bool:
        """Return True if the attempt with this record is running, according to the run's status."""
        return record is self.newest_record and now.state == "running"
