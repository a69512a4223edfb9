"""A run's files for ``status`` and ``compare``, read once each, and the layout of its step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hpc_train.errors import HpcTrainError
from hpc_train.experiment.topology.batch_arithmetic import StepLayout
from hpc_train.paths import AttemptPaths, RunPaths
from hpc_train.run.attempts import AttemptRecord, read_record
from hpc_train.run.found_micro_batch import kept_size
from hpc_train.run.run_status import run_facts

if TYPE_CHECKING:
    from hpc_train.experiment.config.schema import Job
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
    def experiment(self) -> Job | None:
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


def ranks_of(facts: Mapping[str, Any], record: AttemptRecord | None) -> int | None:
    """Return the ranks of the newest attempt or, before the first, the planned ranks; None if unknown.

    ``facts``: the content of ``run.json``.
    """
    if record is not None and record.ranks is not None:
        return record.ranks
    planned = facts.get("ranks")
    return planned if type(planned) is int else None


def layout_of(run: RunFiles) -> StepLayout | None:
    """Return the layout of a step; None if the ranks or the frozen experiment are unknown."""
    ranks, planned = ranks_of(run.facts, run.newest_record), _planned(run.facts)
    if ranks is None:
        return None
    # An experiment is only read if its values matter.
    if planned and planned.ranks == ranks and planned.micro_batch_size and not run.facts.get("changes"):
        return planned
    return _from_experiment(run, ranks)


def _planned(facts: Mapping[str, Any]) -> StepLayout | None:
    noted = facts.get("step")
    if not isinstance(noted, dict):
        return None
    values: dict[str, Any] = {field.name: noted.get(field.name) for field in fields(StepLayout)}
    sizes = [values["global_batch_size"], values["micro_batch_size"], values["ranks"], values["data_ranks"]]
    if not all(type(size) is int and size > 0 for size in sizes) or not isinstance(values["precision"], str):
        return None
    return StepLayout(**values)


def _from_experiment(run: RunFiles, ranks: int) -> StepLayout | None:
    from hpc_train.experiment.workload import workload_of
    from hpc_train.launchers.lookup import launcher_in

    experiment, record = run.experiment, run.newest_record
    if experiment is None:
        return None
    nodes = len(record.hosts) if record is not None else 0
    launcher = launcher_in(run.paths, run.facts)
    per_node = ranks // nodes if nodes else launcher.ranks(experiment, ranks).per_node or ranks
    return workload_of(experiment).step_layout(experiment, ranks, min(ranks, per_node), kept_size(run.paths))
