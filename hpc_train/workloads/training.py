"""Our trainer as the workload of a job: its data, weights and batches, checked before a run is queued."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts import built_in, by_name
from hpc_train.experiment.data_facts.by_name import data_facts, misplaced, missing_index
from hpc_train.experiment.plan.input_files import LIMIT_S, fingerprints, missing_pack, pack_files
from hpc_train.experiment.topology.batch_arithmetic import StepLayout
from hpc_train.experiment.topology.degrees import Degrees, Ranks, find_degrees
from hpc_train.experiment.validate import own_parts, rules, task_rules
from hpc_train.experiment.workload import Workload
from hpc_train.paths import RunPaths, expanded
from hpc_train.run.found_micro_batch import kept_size
from hpc_train.run.weight_source import KEY, source_facts


class TrainingWorkload(Workload[Experiment]):
    """Our trainer. See ``Workload``."""

    preparation = "hpc_train.training.prepare"

    def start_problems(self, job: Experiment, ranks: Ranks, paths: RunPaths) -> list[Problem]:
        """Return keys that don't fit the ranks."""
        size = kept_size(paths) if job.optimization.micro_batch_size == "auto" else None
        return rules.check_start(job, ranks.most, ranks.per_node, ranks.fewest, size)

    def missing_code(self, jobs: Sequence[Experiment], code_root: Callable[[], Path | None]) -> list[Problem]:
        """Return missing models, tasks and transforms of the user's own, and missing weights."""
        problems = list(own_parts.missing_parts(jobs, code_root))
        for text in dict.fromkeys(job.model.init_from for job in jobs):
            try:
                source_facts(text)
            except BadFileError as error:
                message, _, remedy = str(error).removeprefix(f"{KEY}: ").rpartition("; ")
                problems.append(Problem(tuple(KEY.split(".")), message, remedy, code="weights.absent"))
        return problems

    def misplaced_data(self, job: Experiment, *, is_queued: bool) -> Problem | None:
        """Return the problem of a ``data.root`` without the folders that the data set needs."""
        root = None if job.data.root is None else expanded(job.data.root)
        try:
            if root is None or not root.exists():
                return None
            is_empty = root.is_dir() and not any(root.iterdir())
            return None if is_queued and is_empty else misplaced(job.data)
        except OSError:  # the ranks may be able to read it
            return None

    def missing_data(self, job: Experiment, remedy: str | None = None) -> list[Problem]:
        """Return the problem of a missing ``data.root``, else of a missing pack or index."""
        data = job.data
        if data.root is not None and not expanded(data.root).exists():
            message = f"{data.root} does not exist on this machine"
            return [Problem(("data", "root"), message, remedy or _root_remedy(data), code="data.root-absent")]
        return missing_pack_problems(data)

    def notes(self, job: Experiment) -> list[str]:
        """Return a line on the pack that ranks read, if there is one."""
        data = job.data
        packs = None if data.cache is None else possible_packs(data)
        pack = next((file for file in packs or () if file.is_file()), None)
        if pack is None:
            return []
        place = "its temporary folder" if data.stage is True else data.stage
        staged = f"; each node copies it to {place} first" if data.stage else ""
        return [f"data.cache: ranks read {pack} ({pack.stat().st_size} bytes){staged}"]

    def remarks(self, job: Experiment) -> list[Problem]:
        """Return the remarks on the modes of metrics."""
        return list(task_rules.remarks(job))

    def input_facts(self, job: Experiment) -> dict[str, Any]:
        """Return the fingerprints of the data and of the weights."""
        initial = source_facts(job.model.init_from)
        return initial | {"inputs": fingerprints(job) | initial["inputs"]}

    def inputs_now(self, job: Experiment, recorded: object) -> Mapping[str, Mapping[str, str]]:
        """Return the fingerprints of the data and of the weights; without weights that are gone."""
        now = fingerprints(job, recorded)
        with suppress(BadFileError):  # the weights are gone: a run that has begun does not need them
            now |= source_facts(job.model.init_from)["inputs"]
        return now

    def data_paths(self, job: Experiment) -> list[str]:
        """Return ``data.root`` and ``data.cache``."""
        return [path for path in (job.data.root, job.data.cache) if path]

    def prefetched_bytes(self, job: Experiment, ranks: int) -> int | None:
        """Return the bytes of the images that loader processes read ahead."""
        return by_name.prefetched_bytes(job, ranks)

    def weights_command(self, run: str) -> Sequence[str]:
        """Return the command that exports the weights."""
        return ("hpc-train", "export", run, "-o", "weights.safetensors")

    def step_layout(
        self, job: Experiment, ranks: int, per_node: int, micro_batch_size: int | None
    ) -> StepLayout | None:
        """Return the layout by the file's batch sizes."""
        degrees = find_degrees(job.parallel, ranks, per_node)
        optimization = job.optimization
        size = optimization.micro_batch_size
        return StepLayout(
            optimization.global_batch_size,
            micro_batch_size if size == "auto" else size,
            ranks,
            degrees.data_ranks if isinstance(degrees, Degrees) else ranks,
            job.precision,
        )


def _root_remedy(data: DataConfig) -> str:
    facts = data_facts(data.name)
    write = f"write {facts.root}"
    if facts.is_downloaded:
        return f"{write}, or fetch them with `hpc-train prepare FILE`"
    is_useless = data.name in built_in.DATA_SETS and not facts.needs_root
    return f"take it out; {data.name} needs none" if is_useless else write


def missing_pack_problems(data: DataConfig) -> list[Problem]:
    """Return the problem if the pack, or the index, that ranks need is missing here."""
    if (problem := missing_index(data)) is not None:
        return [problem]
    files = None if data.cache is None else possible_packs(data)
    if files is None or any(file.is_file() for file in files):
        return []
    return [Problem(("data", "cache"), *missing_pack(data), code="data.pack-absent")]


def possible_packs(data: DataConfig) -> list[Path] | None:
    """Return the possible packs; None if images are not packed, or take too long to list before a start.

    Raises BadFileError if the data can't be listed.
    """
    if not data_facts(data.name).is_packable:
        return None
    try:
        return pack_files(data, LIMIT_S)
    except OSError:
        return None
