"""``resume`` of completed runs: with another length they are extended, every other key is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.paths import RunPaths
from hpc_train.run import evaluation_jobs
from hpc_train.run.bad_samples import BadSample, all_known, append
from hpc_train.run.checkpoints import Manifest, committed, verify
from hpc_train.run.digests import (
    DigestsFile,
    PartDigest,
    RecordsFile,
    StepDigest,
    read_digests,
    read_parts,
)
from hpc_train.run.files import write_json
from hpc_train.run.find import find_runs
from hpc_train.run.found_micro_batch import Found, keep, kept_size
from hpc_train.run.run_status import read_status, write_status
from hpc_train.run.spikes import Spike, SpikesFile, read_spikes, rule_at
from hpc_train.training.datasets.skipping import BadSamples
from tests.cli.commands import Done, hpc_train
from tests.cli.launchers import COMPLETING, FAILING, QUEUE, queued, requests
from tests.run.runs import write_rows
from tests.run.test_checkpoints import begin_attempt, write_checkpoint


def _facts(paths: RunPaths) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(paths.run.read_text())
    return facts


def _resume(*words: str | Path) -> Done:
    return hpc_train("resume", *words)


def _complete(paths: RunPaths, step: int, launcher: str = COMPLETING) -> RunPaths:
    write_checkpoint(paths, step, attempt=1)
    write_status(paths, replace(read_status(paths), state="completed", step=step, total_steps=step))
    return paths


def _submitted(file: Path, steps: int, *words: str) -> RunPaths:
    """Return a run of these steps, which the launcher ends at the fifth one."""
    length = ("optimization.epochs=null", f"optimization.steps={steps}")
    hpc_train("submit", file, "--local", "--launcher", COMPLETING, *length, *words)
    (paths,) = find_runs([])
    return paths


@pytest.fixture
def completed(file: Path) -> RunPaths:
    """A run of 5 steps on three devices that has completed."""
    return _complete(_submitted(file, 5, "--devices", "3"), 5)


def _new_run(*old: RunPaths) -> RunPaths:
    (new,) = set(find_runs([])) - set(old)
    return new


def test_more_steps_start_a_new_run_from_the_checkpoints_of_the_old_one(completed: RunPaths) -> None:
    rows = [{"split": "train", "step": step, "attempt": 1, "loss": 0.5} for step in (1, 5, 6)]
    write_rows(completed, rows)
    keep(completed, Found(size=4, too_large=8, ranks=3, attempt=1))
    kept = {path: path.read_bytes() for path in completed.folder.rglob("*") if path.is_file()}
    done = _resume(completed.folder, "optimization.steps=9", "data.workers=2", "--json")
    assert done.code == 0, done.err
    new = _new_run(completed)
    assert [row["id"] for row in json.loads(done.out)["runs"]] == [new.folder.name]
    request = requests[-1]
    assert (request.paths, request.attempt, request.devices) == (new, 1, 3)
    experiment = request.experiment
    assert (experiment.optimization.steps, experiment.data.workers) == (9, 2)
    assert f"{new.folder.name}: attempt 1 continues from step 5, from now on with data.workers=2" in done.err
    (checkpoint,) = committed(new)
    assert (checkpoint.step, Manifest.read(checkpoint).attempt, verify(checkpoint)) == (5, 0, [])
    copied = list(map(json.loads, new.metrics.read_text().splitlines()))[:-1]  # the last: of the new run
    assert copied == [row | {"attempt": 0} for row in rows[:2]]
    old_facts, facts = _facts(completed), _facts(new)
    assert facts["extends"] == {"run": completed.folder.name, "step": 5}
    assert old_facts["extended_by"] == [new.folder.name]
    assert facts["wandb_id"] != old_facts["wandb_id"]
    assert kept_size(new) == 4
    del kept[completed.run]
    assert {path: path.read_bytes() for path in kept} == kept


def test_a_longer_run_has_the_records_that_a_resume_of_the_old_one_would_read(completed: RunPaths) -> None:
    digests = [StepDigest(step, 7 * step, 1 / step, 0.5, attempt=1) for step in range(1, 8)]
    parts = [PartDigest(step, 3, step, step, attempt=1) for step in (2, 4, 6)]
    for file, records in (
        (DigestsFile(completed.digests, 0), digests),
        (RecordsFile(completed.part_digests, 0, PartDigest), parts),
    ):
        file.append(records)
        file.close()
    spikes = SpikesFile(completed.spikes, 0)
    spikes.append(Spike(3, 9.0, 1.0), [1, 2], "skip")
    sample = BadSample("train", 4, "4.jpg", "it is empty")
    append(completed.attempt(1).bad_samples(2), [sample])
    for step in (2, 5):
        evaluation_jobs.request(completed, step)
    write_json(completed.evaluation_job(2, "json"), row := {"split": "val", "step": 2, "loss": 0.25})
    evaluation_jobs.note_job(completed, 5, "17")
    best = {"metric": "accuracy", "value": 0.5, "step": 5, "mode": "max"}
    write_status(completed, replace(read_status(completed), best=best))
    done = _resume(completed.folder, "optimization.steps=9", "--launcher", QUEUE)
    assert done.code == 0, done.err
    new = _new_run(completed)
    inherited = list(read_digests(new.digests))
    assert inherited == [replace(digest, attempt=0) for digest in digests[:5]]
    assert rule_at(new, 5).to_bits() == rule_at(completed, 5).to_bits()
    assert [list(of_step.values()) for _, of_step in read_parts(new.part_digests)] == [
        [replace(part, attempt=0)] for part in parts[:2]
    ]
    assert list(read_spikes(new)) == list(read_spikes(completed)) != []
    assert all_known(new) == {sample.key: sample} and BadSamples(new, 1, 0).earlier == 1
    assert evaluation_jobs.rows(new) == {2: row}
    assert (evaluation_jobs.unfinished(new), evaluation_jobs.submitted(new)) == ([5], [])
    assert read_status(new).best == best


def test_a_checkpoint_of_the_old_run_counts_also_after_an_attempt_that_never_began(
    completed: RunPaths,
) -> None:
    _resume(completed.folder, "optimization.steps=9")
    new = _new_run(completed)
    new.attempt(1).record.unlink()
    new.attempt(2).folder.mkdir()
    assert [checkpoint.step for checkpoint in committed(new)] == [5]
    begin_attempt(new, 3)
    assert [checkpoint.step for checkpoint in committed(new)] == [5]


def test_the_same_command_continues_the_run_that_it_created(completed: RunPaths) -> None:
    _resume(completed.folder, "optimization.steps=9", "--launcher", FAILING)
    new = _new_run(completed)
    done = _resume(completed.folder, "optimization.steps=9", "--launcher", COMPLETING)
    assert done.code == 0, done.err
    assert f"{completed.folder.name}: extended already by {new.folder.name}" in done.err
    assert (requests[-1].paths, requests[-1].attempt) == (new, 2)
    assert set(find_runs([])) == {completed, new}
    assert f"extended by {new.folder.name}; nothing to resume" in _resume(completed.folder).err


@pytest.mark.parametrize(
    ("words", "code", "reason", "remedy"),
    [
        (["optimization.steps=4"], 2, "has completed 5 steps", "more, for example optimization.steps=10"),
        (["optimization.optimizer.lr=0.5"], 2, "can only be trained longer", "lr=0.5 model.init_from={run}"),
        (["optimization.steps=9", "seed=7"], 2, "seed: {run} has", "steps=9 seed=7 model.init_from={run}"),
        (["name=other"], 2, "name: {run} has completed", "name=other"),
        (["data.workers=3"], 2, "changes nothing", "resume {run} optimization.steps=10 data.workers=3`"),
        (["optimization.steps=9", "nonsense=1"], 65, "nonsense: unknown key", ""),
        (["optimization.steps=9", "optimization.epochs=3"], 65, "can't be combined", "take one of the two"),
        (["optimization.steps=many"], 65, "needs a whole number", ""),
    ],
)  # fmt: skip
def test_what_is_not_longer_is_refused_with_what_to_do(
    completed: RunPaths, words: list[str], code: int, reason: str, remedy: str
) -> None:
    done = _resume(completed.folder, *words)
    run = completed.folder.name
    assert done.code == code, done.err
    assert reason.format(run=run) in done.err and remedy.format(run=run) in done.err
    assert find_runs([]) == [completed]
    assert not _facts(completed).get("extended_by")


def test_a_longer_run_that_can_not_start_is_removed_again(completed: RunPaths) -> None:
    done = _resume(completed.folder, "optimization.steps=9", "--devices", "99")
    assert done.code == 65, done.err
    assert "removed again" in done.err
    assert find_runs([]) == [completed]
    assert _facts(completed)["extended_by"] == []


def test_the_length_may_change_its_unit(completed: RunPaths) -> None:
    state = completed.checkpoint(5).state
    state.write_text(json.dumps({"version": 1, "extra": {"steps_per_epoch": 4}}))
    done = _resume(completed.folder, "optimization.epochs=1")
    assert done.code == 2 and "has completed 5 steps" in done.err
    done = _resume(completed.folder, "optimization.epochs=2")
    assert "extends" in done.err and "to step 8" in done.err
    optimization = requests[-1].experiment.optimization
    assert (optimization.epochs, optimization.steps) == (2, None)


def test_a_schedule_over_the_whole_length_is_pointed_out(file: Path) -> None:
    paths = _complete(_submitted(file, 5, "optimization.schedule.name=cosine"), 5)
    done = _resume(paths.folder, "optimization.steps=9")
    assert "cosine is now that of the new length" in done.err


def test_a_run_that_early_stopping_ended_is_not_extended(file: Path) -> None:
    paths = _submitted(file, 9, "early_stopping={metric: loss, mode: min, patience: 1}")
    write_checkpoint(paths, 5, attempt=1)
    done = _resume(paths.folder, "optimization.steps=20")
    assert done.code == 2
    remedy = f"optimization.steps=20 early_stopping=null model.init_from={paths.folder.name}"
    assert "ended at step 5 of 9" in done.err and remedy in done.err


@pytest.mark.parametrize(("state", "command"), [("failed", "resume"), ("running", "logs -f")])
def test_an_unfinished_run_is_completed_first(completed: RunPaths, state: str, command: str) -> None:
    write_status(completed, replace(read_status(completed), state=state, step=4))
    if state == "running":
        begin_attempt(completed, 2)
    run = completed.folder.name
    done = _resume(run, "optimization.steps=9")
    assert done.code == 2, done.err
    command_line = (
        f"`hpc-train {command} {run}` to its end, then `hpc-train resume {run} optimization.steps=9`"
    )
    assert f"first {command_line}" in done.err
    assert find_runs([]) == [completed]


def test_all_runs_of_a_sweep_get_longer_and_later_only_the_longer_ones(file: Path) -> None:
    grid = 'sweep.grid={seed: [1, 2], "optimization.steps": [5]}'
    hpc_train("submit", file, "--launcher", QUEUE, "optimization.epochs=null", "optimization.steps=5", grid)
    old = [_complete(paths, 5) for paths in find_runs([])]
    for paths in old:
        begin_attempt(paths, 1)
    queued.clear()
    done = _resume("tiny", "optimization.steps=9", "slurm.nodes=2")
    assert done.code == 0, done.err
    (batch,) = queued
    new = [run.paths for run in batch]
    assert len(new) == 2 and not set(new) & set(old)
    assert [run.experiment.optimization.steps for run in batch] == [9, 9]
    assert [_facts(paths)["values"] for paths in new] == [
        {"seed": seed, "optimization.steps": 9} for seed in (_facts(paths)["values"]["seed"] for paths in old)
    ]
    for paths in new:
        begin_attempt(paths, 1)
        write_status(paths, replace(read_status(paths), state="completed", step=9, total_steps=9))
    done = _resume("tiny", "optimization.steps=12")
    assert done.code == 0, done.err
    assert {_facts(run.paths)["extends"]["run"] for run in queued[-1]} == {paths.folder.name for paths in new}


def test_status_and_report_name_both_runs(completed: RunPaths, tmp_path: Path) -> None:
    _resume(completed.folder, "optimization.steps=9")
    old, new = completed.folder.name, _new_run(completed).folder.name
    assert f"extends {old} from step 5" in hpc_train("status").out
    assert f"extended by  {new}\n" in hpc_train("status", old).out
    rows = {row["id"]: row for row in json.loads(hpc_train("status", "--json").out)["runs"]}
    assert (rows[new]["extends"], rows[old]["extended_by"]) == ({"run": old, "step": 5}, [new])
    assert hpc_train("report", "tiny", "-o", tmp_path / "report.html").code == 0
    page = (tmp_path / "report.html").read_text()
    assert f"<dt>extends</dt><dd>{old} from step 5</dd>" in page
    assert f"<dt>extended by</dt><dd>{new}</dd>" in page


def test_a_run_that_others_may_write_is_not_extended(completed: RunPaths) -> None:
    completed.folder.chmod(0o722)
    done = _resume(completed.folder, "optimization.steps=9")
    assert done.code == 1 and "group or others may write it" in done.err
    assert find_runs([]) == [completed]


def test_a_submit_of_more_steps_names_the_run_that_a_resume_would_continue(
    completed: RunPaths, file: Path
) -> None:
    words = ("--local", "--launcher", COMPLETING, "optimization.epochs=null")
    hint = f"`hpc-train resume {completed.folder.name} optimization.steps=9` trains it longer"
    assert hint not in hpc_train("submit", file, *words, "optimization.steps=4").err
    assert hint not in hpc_train("submit", file, *words, "optimization.steps=9", "seed=8").err
    assert hint in hpc_train("submit", file, *words, "optimization.steps=9").err
    again = hpc_train("submit", file, *words, "optimization.steps=5")
    assert f"`hpc-train resume {completed.folder.name} optimization.steps=10` longer" in again.err
