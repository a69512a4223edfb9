"""Creates the run that trains a completed run longer, from its checkpoints. Called by ``resume``."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.plan.sweep import RUN_ID_LENGTH, content_hash
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.run import bad_samples, files, frozen_experiment
from hpc_train.run.checkpoints import INHERITED, Manifest, committed
from hpc_train.run.code import snapshot
from hpc_train.run.create import new_identity, newest_versions, run_to_change
from hpc_train.run.digests import PartDigest, StepDigest, copy_records
from hpc_train.run.metric_rows import lines_of, parse_row
from hpc_train.run.run_status import INTERRUPTED, RunStatus, extended_run, read_status

#: The keys that an extension changes, without their section ``optimization``.
LENGTH = ("steps", "epochs")
_ATTEMPT = re.compile(rb'("attempt": )\d+')


def begin_of(run: Mapping[str, Any]) -> int:
    """Return the step at which a run begins to train: 0, or the last step of the run that it extends.

    ``run``: the content of ``run.json``. The schedule of the extended run may have another length.
    """
    return int((run.get("extends") or {}).get("step", 0))


def extend(
    paths: RunPaths, experiment: Experiment, total_steps: int | None, overrides: Sequence[str]
) -> RunPaths:
    """Return the run that continues ``paths`` from its last checkpoint with ``experiment``; create it if new.

    Its files are complete and independent of the old run's: the checkpoints are hard links, or copies if the
    file system has none. It is interrupted at the checkpoint's step until a resume starts it. ``overrides``:
    ``KEY=VALUE`` of the new length.
    """
    checkpoints = committed(paths)
    step = checkpoints[0].step
    facts = _facts(paths, experiment, step, overrides)
    extension = RunPaths(paths.folder.with_name(facts["id"]))

    def fill(folder: Path) -> None:
        temporary = RunPaths(folder)
        frozen_experiment.write(temporary, experiment)
        files.write_new(temporary.run, files.json_text(facts))
        if (code := snapshot.linked(paths)) is not None:
            snapshot.link(temporary, code)
        if paths.micro_batch.exists():
            _copy(paths.micro_batch, temporary.micro_batch)
        if paths.evaluations.is_dir():
            shutil.copytree(paths.evaluations, temporary.evaluations, symlinks=True)
        _copy_records(paths, temporary, step)
        temporary.checkpoints.mkdir()
        for checkpoint in checkpoints:
            _link_checkpoint(checkpoint, temporary.checkpoint(checkpoint.step))
        files.sync_folder(temporary.checkpoints)
        old = read_status(paths)
        status = RunStatus(
            state=INTERRUPTED, step=step, total_steps=total_steps, epoch=old.epoch, best=old.best
        )
        files.write_new(temporary.status, files.json_text(status.to_json()), sync=False)
        files.sync_folder(folder)

    if not extension.folder.exists():
        files.create_folder(extension.folder, fill, mode=0o700)
    run = run_to_change(paths)
    if extension.folder.name not in (known := run.get("extended_by") or []):
        files.write_json(paths.run, run | {"extended_by": [*known, extension.folder.name]}, sync=True)
    return extension


def withdraw(paths: RunPaths) -> None:
    """Remove a run that ``extend`` created and that was not started."""
    old = extended_run(paths)
    files.remove_folder(paths.folder)
    if old is not None:
        run = run_to_change(old)
        left = [name for name in run.get("extended_by") or [] if name != paths.folder.name]
        files.write_json(old.run, run | {"extended_by": left}, sync=True)


def _facts(paths: RunPaths, experiment: Experiment, step: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Return ``run.json``: the old run's, but of another identity.

    The id is another than that of a run of this length from step 0, which a schedule may train differently.
    """
    old = run_to_change(paths)
    text = f"{content_hash(experiment)} extends {paths.folder.name} at {step}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    lengths = experiment.optimization.model_dump(include=set(LENGTH))
    values = {
        key: lengths.get(key.removeprefix("optimization."), value)
        for key, value in (old.get("values") or {}).items()
    }
    source = old.get("source")
    if isinstance(source, dict):
        source = source | {"overrides": [*(source.get("overrides") or []), *overrides]}
    code = old.get("code")
    return (
        {key: value for key, value in old.items() if key not in ("extended_by", "versions_by_attempt")}
        | new_identity(digest[:RUN_ID_LENGTH], digest)
        | {
            "source": source,
            "values": values,
            "versions": newest_versions(old),
            "code": code and {key: value for key, value in code.items() if key != "earlier"},
            "extends": {"run": paths.folder.name, "step": step},
        }
    )


def _link_checkpoint(old: CheckpointPaths, new: CheckpointPaths) -> None:
    manifest = Manifest.read(old)
    new.folder.mkdir()
    for name in manifest.files:
        _link(old.folder / name, new.folder / name)
    replace(manifest, attempt=INHERITED).write(new)


def _link(old: Path, new: Path) -> None:
    """Create a hard link, or a copy on another or a limited file system; both are on disk then."""
    with suppress(OSError):
        os.link(old, new)
        return
    _copy(old, new)


def _copy(old: Path, new: Path) -> None:
    """Copy a file and sync the copy to the disk."""
    shutil.copyfile(old, new)
    with new.open("rb") as file:
        files.sync_file(file.fileno())


def _copy_records(old: RunPaths, new: RunPaths, last_step: int) -> None:
    """Copy all that a resume of ``old`` would read besides its checkpoints."""
    _copy_rows(old, new, last_step)
    copy_records(old.digests, new.digests, last_step, StepDigest, INHERITED)
    copy_records(old.part_digests, new.part_digests, last_step, PartDigest, INHERITED)
    for name in ("spikes", "rollbacks"):  # the next attempt drops lines that it does not need
        if (file := getattr(old, name)).exists():
            _copy(file, getattr(new, name))
    if old.evaluation_jobs.is_dir():  # without jobs: the new run submits those that have left no row
        shutil.copytree(old.evaluation_jobs, new.evaluation_jobs, ignore=shutil.ignore_patterns("*.jobs"))
    if samples := bad_samples.all_known(old):
        inherited = new.attempt(INHERITED)
        inherited.folder.mkdir(parents=True)
        bad_samples.append(inherited.bad_samples(0), samples.values())


def _copy_rows(old: RunPaths, new: RunPaths, last_step: int) -> None:
    """Copy the rows up to ``last_step`` as ``INHERITED``: no attempt of the new run took their time."""
    with new.metrics.open("wb") as file:
        for line in lines_of(old.metrics):
            row = parse_row(line)
            if row is not None and row["step"] <= last_step:
                file.write(_ATTEMPT.sub(rb"\g<1>%d" % INHERITED, line, count=1))
        file.flush()
        files.sync_file(file.fileno())
