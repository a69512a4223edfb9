"""A run whose steps are repeated, as its files are: for ``bisect``, ``verify`` and ``reproduce``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hpc_train.cli.evaluate import newest_experiment
from hpc_train.cli.replay import prepared
from hpc_train.experiment.config.schema import Experiment
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.report.reproduction import Parts
from hpc_train.report.run_files import RunFiles, ranks_of
from hpc_train.run.checkpoints import committed, verify
from hpc_train.run.digests import read_digests, read_parts
from hpc_train.run.files import read_json


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

    def node(self, step: int, rank: int | None) -> str | None:
        """Return the node on which a rank computed a step; None if several are possible."""
        attempts = [digest.attempt for digest in read_digests(self.paths.digests, step, step)]
        records = [record for record in self.files.records if record.attempt & 0xFFFF in attempts]
        record = next(reversed(records or self.files.records), None)
        if record is None or not record.hosts or (rank is None and len(record.hosts) > 1):
            return None
        per_node = -(-(record.ranks or 1) // len(record.hosts))
        return record.hosts[min((rank or 0) // per_node, len(record.hosts) - 1)]


def thread_variables(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables with which ranks compute with as many CPU threads as the run's."""
    counts = set(facts["threads"] or ())
    return {"OMP_NUM_THREADS": str(*counts)} if facts["device"] == "cpu" and len(counts) == 1 else {}
