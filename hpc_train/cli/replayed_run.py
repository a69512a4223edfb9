"""A run whose steps are repeated, as its files are: for ``replay`` and the commands that use it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hpc_train.cli.evaluate import experiment_of, newest_experiment
from hpc_train.errors import HpcTrainError
from hpc_train.experiment.config.schema import CheckpointConfig, Experiment
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.report.parted_steps import Lines
from hpc_train.report.reproduction import Parts
from hpc_train.report.run_files import RunFiles, ranks_of
from hpc_train.run.attempts import newest_number
from hpc_train.run.checkpoints import Manifest, committed, verify
from hpc_train.run.digests import read_digests, read_parts
from hpc_train.run.extension import begin_of
from hpc_train.run.files import read_json


@dataclass(frozen=True)
class TrainedSteps:
    """Consecutive steps that as many ranks trained under the same ``parallel`` section."""

    #: The step of the checkpoint from which they continued; 0: the start.
    begin: int
    last: int
    #: None: not recorded.
    ranks: int | None
    #: The attempt that trained the last of them.
    attempt: int
    experiment: Experiment


@dataclass
class ReplayedRun:
    """One of the runs, as its files are."""

    paths: RunPaths
    name: str
    uses_new_code: bool
    #: The interpreter of its replays; None: this one.
    python: Path | None = None

    @cached_property
    def files(self) -> RunFiles:
        """The run's records."""
        return RunFiles.read(self.paths)

    @property
    def begin(self) -> int:
        """The step at which it begins to train: 0, or the last step of the run that it extends."""
        return begin_of(self.files.facts)

    @cached_property
    def experiment(self) -> Experiment:
        """The newest experiment, without the parts that do not act on steps."""
        return prepared(newest_experiment(self.paths, []))

    @cached_property
    def checkpoints(self) -> dict[int, CheckpointPaths]:
        """Step → checkpoint, lowest step first."""
        return {checkpoint.step: checkpoint for checkpoint in reversed(committed(self.paths))}

    @cached_property
    def damage(self) -> dict[int, str]:
        """Step → the problems of a damaged checkpoint."""
        problems = {step: verify(checkpoint) for step, checkpoint in self.checkpoints.items()}
        return {step: "; ".join(lines) for step, lines in problems.items() if lines}

    @cached_property
    def parts(self) -> Parts:
        """The digests of parts by step."""
        return dict(read_parts(self.paths.part_digests))

    def newest_before(self, step: int) -> int:
        """Return the step of the newest intact checkpoint before ``step``; 0 if there is none."""
        intact = self.checkpoints.keys() - self.damage.keys()
        return max((saved for saved in intact if saved < step), default=0)

    def machine(self, after: int | None = None) -> dict[str, Any]:
        """Return where the run computed: of its newest checkpoint, or of the first one after a step."""
        record = self.files.newest_record
        saved = list(self.checkpoints.values())
        later = [checkpoint for checkpoint in saved if after is not None and checkpoint.step > after]
        chosen = next(iter([*later[:1], *saved[-1:]]), None)
        extra = (read_json(chosen.state) or {}).get("extra") or {} if chosen else {}
        return {
            "ranks": ranks_of(self.files.facts, record),
            "nodes": record.hosts if record else None,
            "device": extra.get("device"),
            **dict.fromkeys(("processor", "threads")),
            **(extra.get("hardware") or {}),
        }

    def trained(self, begin: int, last: int) -> list[TrainedSteps]:
        """Return who trained the steps after ``begin`` up to ``last``, in order; at least one part.

        By the attempts of the digests; without digests one part, by the checkpoint of ``last``, else by the
        newest attempt.
        """
        records = {record.attempt & 0xFFFF: record for record in self.files.records}
        attempts: list[tuple[int, int]] = []
        for digest in read_digests(self.paths.digests, begin + 1, last):
            if not attempts or digest.attempt != attempts[-1][1]:
                attempts.append((digest.step - 1, digest.attempt))
        parts: list[TrainedSteps] = []
        for start, attempt in attempts:
            record = records.get(attempt)
            if record is None or record.ranks is None:
                continue  # assume that nothing has changed
            experiment = prepared(experiment_of(self.paths, record.attempt, []))
            part = TrainedSteps(start if parts else begin, last, record.ranks, record.attempt, experiment)
            if parts and _conditions(parts[-1]) == _conditions(part):
                part = replace(part, begin=parts.pop().begin)
            elif parts:
                parts[-1] = replace(parts[-1], last=start)
            parts.append(part)
        if parts:
            return parts
        saved = self.checkpoints.get(last)
        ranks = self.machine()["ranks"] if saved is None else Manifest.read(saved).world_size
        return [TrainedSteps(begin, last, ranks, newest_number(self.paths), self.experiment)]

    def node(self, step: int, rank: int | None) -> str | None:
        """Return the node on which a rank computed a step; None if several are possible."""
        attempts = [digest.attempt for digest in read_digests(self.paths.digests, step, step)]
        records = [record for record in self.files.records if record.attempt & 0xFFFF in attempts]
        record = next(reversed(records or self.files.records), None)
        if record is None or not record.hosts or (rank is None and len(record.hosts) > 1):
            return None
        per_node = -(-(record.ranks or 1) // len(record.hosts))
        return record.hosts[min((rank or 0) // per_node, len(record.hosts) - 1)]


def _conditions(steps: TrainedSteps) -> tuple[int | None, object]:
    """Return the conditions under which a replay of the steps is bitwise identical."""
    return steps.ranks, steps.experiment.parallel


def prepared(experiment: Experiment) -> Experiment:
    """Return the experiment without the parts that act on the run instead of on its steps."""
    without = {"profile": None, "early_stopping": None, "checkpoint": CheckpointConfig()}
    return experiment.model_copy(update=without)


def thread_variables(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables with which ranks compute with as many CPU threads as the run's."""
    counts = set(facts["threads"] or ())
    return {"OMP_NUM_THREADS": str(*counts)} if facts["device"] == "cpu" and len(counts) == 1 else {}


def replayed_lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of one rank. Raises HpcTrainError if they can't be read."""
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise HpcTrainError(f"{file}: can't be read: {error}") from error


def replayed_stretches(folder: RunPaths, num_ranks: int) -> list[tuple[Lines, float]]:
    """Return the lines of the stretches that all ranks have completed, and the seconds of rank 0."""
    of_ranks = []
    for rank in range(num_ranks):
        try:
            of_ranks.append(list(_split(replayed_lines(folder.replay(rank)))))
        except HpcTrainError:  # the rank has failed before, which is reported
            return []
    stretches: list[tuple[Lines, float]] = []
    for parts in zip(*of_ranks, strict=False):
        lines = {of_step[0]["step"]: of_step for of_step in zip(*(lines for lines, _ in parts), strict=False)}
        stretches.append((lines, parts[0][1]))
    return stretches


def _split(lines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[list[Mapping[str, Any]], float]]:
    """Yield the lines of each completed stretch, and its seconds."""
    stretch: list[Mapping[str, Any]] = []
    for line in lines:
        if "ended" in line:
            yield stretch, line["seconds"]
            stretch = []
        else:
            stretch.append(line)
