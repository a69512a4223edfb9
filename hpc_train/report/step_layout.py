"""The arithmetic of a run's step in its newest attempt, for ``status`` and ``compare``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from hpc_train.run.found_micro_batch import kept_size
from hpc_train.topology.batch_arithmetic import StepLayout

if TYPE_CHECKING:
    from hpc_train.report.run_files import RunFiles
    from hpc_train.run.attempts import AttemptRecord


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
    from hpc_train.launchers.lookup import launcher_in
    from hpc_train.topology.degrees import Degrees, find_degrees

    experiment, record = run.experiment, run.newest_record
    if experiment is None:
        return None
    nodes = len(record.hosts) if record is not None else 0
    launcher = launcher_in(run.paths, run.facts)
    per_node = ranks // nodes if nodes else launcher.ranks(experiment, ranks).per_node or ranks
    found = find_degrees(experiment.parallel, ranks, min(ranks, per_node))
    optimization = experiment.optimization
    size = optimization.micro_batch_size
    return StepLayout(
        optimization.global_batch_size,
        kept_size(run.paths) if size == "auto" else size,
        ranks,
        found.data_ranks if isinstance(found, Degrees) else ranks,
        experiment.precision,
    )
