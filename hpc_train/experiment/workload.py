"""The seam between a job and what its runs execute.

An experiment file describes a job (``config.schema.Job``) plus one workload: our trainer, or a program of the
user's. Submission, recovery, status and reports know this protocol only; ``workload_of`` returns the
implementation, which ``hpc_train.workloads`` holds. Imports no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.config.schema import Job
from hpc_train.experiment.topology.batch_arithmetic import StepLayout
from hpc_train.experiment.topology.degrees import Ranks
from hpc_train.paths import RunPaths

J = TypeVar("J", bound=Job)
J_contra = TypeVar("J_contra", bound=Job, contravariant=True)

#: ``Job.workload`` → the implementation of ``Workload``.
_IMPLEMENTATIONS = {
    "training": "hpc_train.workloads.training:TrainingWorkload",
    "program": "hpc_train.workloads.program:ProgramWorkload",
}


class Workload(Generic[J_contra]):
    """The facts about the work that the runs of a job execute. Constructed without arguments; methods read
    files, but change none.

    The methods here are those of a workload whose data, weights and steps are unknown.
    """

    #: Module that `prepare` executes in a child process, with the file, its options and overrides.
    preparation: str

    def start_problems(self, job: J_contra, ranks: Ranks, paths: RunPaths) -> list[Problem]:
        """Return the problems that prevent a start of the run, which may not exist yet, on these ranks."""
        return []

    def missing_code(self, jobs: Sequence[J_contra], code_root: Callable[[], Path | None]) -> list[Problem]:
        """Return the problems of the user's own code and files that these runs name and that are missing.

        ``code_root``: returns the root of the work tree around the current folder, None without one.
        """
        return []

    def misplaced_data(self, job: J_contra, *, is_queued: bool) -> Problem | None:
        """Return the problem if the data visible from here don't have the layout that the run expects."""
        return None

    def missing_data(self, job: J_contra, remedy: str | None = None) -> list[Problem]:
        """Return the problems of data that ranks need on this machine. ``remedy``: in place of the usual."""
        return []

    def notes(self, job: J_contra) -> list[str]:
        """Return lines for ``plan`` on what ranks will read."""
        return []

    def remarks(self, job: J_contra) -> list[Problem]:
        """Return the remarks on settings that are valid but probably not intended."""
        return []

    def input_facts(self, job: J_contra) -> dict[str, Any]:
        """Return ``inputs`` and ``init_from`` of ``run.json``. Raises BadFileError if one is missing."""
        return {"inputs": {}, "init_from": None}

    def inputs_now(self, job: J_contra, recorded: object) -> Mapping[str, Mapping[str, str]]:
        """Return the fingerprints of the inputs by key; ``recorded``: those to compare with."""
        return {}

    def data_paths(self, job: J_contra) -> list[str]:
        """Return the paths of the data: containers see them, snapshots of the code exclude them."""
        return []

    def prefetched_bytes(self, job: J_contra, ranks: int) -> int | None:
        """Return the bytes of shared memory that ranks on one node need for data; None if unknown."""
        return None

    def weights_command(self, run: str) -> Sequence[str]:
        """Return the command that writes the weights of a run; empty if its own files contain them."""
        return ()

    def step_layout(
        self, job: J_contra, ranks: int, per_node: int, micro_batch_size: int | None
    ) -> StepLayout | None:
        """Return the layout of a step on these ranks; None if the workload has no such steps."""
        return None


def workload_of(job: J) -> Workload[J]:
    """Return the workload of a job."""
    module, _, name = _IMPLEMENTATIONS[job.workload].partition(":")
    return cast("Workload[J]", getattr(importlib.import_module(module), name)())
