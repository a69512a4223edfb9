"""The work of commands per run: the same for every run, whatever their number."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from hpc_train.launchers.slurm.launcher import SlurmLauncher
from hpc_train.launchers.slurm.queue_status import statuses
from hpc_train.paths import RunPaths, runs_root
from hpc_train.run.files import write_json
from hpc_train.run.run_status import RunStatus, write_status
from tests.calls import Work, count_calls, work_of
from tests.cli.commands import hpc_train, succeeded
from tests.cli.launchers import QUEUE
from tests.launchers.slurm.programs import put_programs_first
from tests.launchers.slurm.queued import queued_run
from tests.run.code.trees import work_tree

#: The files of a run, its folder, and nothing of the experiment's.
_SYNCS_PER_RUN = 4
_FEW, _MANY = 3, 9


def _submit(file: Path, runs: int, monkeypatch: pytest.MonkeyPatch) -> Work:
    def submit() -> None:
        name, seeds = f"name=of{runs}", f"sweep.grid={{seed: {list(range(runs))}}}"
        succeeded("submit", file, name, seeds, "--launcher", QUEUE)

    return work_of(submit, monkeypatch)


def test_submit_does_constant_work_per_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work_tree(Path(), "model.py")  # so that submit asks git for its commit
    _submit(file, 1, monkeypatch)  # writes the snapshot of the code
    works = [_submit(file, runs, monkeypatch) for runs in (_FEW, 2 * _FEW, _MANY)]
    assert len({len(work.programs) for work in works}) == 1 and works[0].programs
    assert [later.syncs - work.syncs for work, later in pairwise(works)] == [_SYNCS_PER_RUN * _FEW] * 2
    second, third = (len(later.opened) - len(work.opened) for work, later in pairwise(works))
    assert second == third > 0


def test_status_reads_no_file_of_a_run_twice(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _submit(file, _FEW, monkeypatch)
    work = work_of(lambda: hpc_train("status"), monkeypatch)
    counts = Counter(path for path in work.opened if path.endswith((".json", ".yaml")))
    assert counts and max(counts.values()) == 1


def test_submit_reads_earlier_submissions_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of runs that a killed submit has left, each is looked for in them."""
    runs = [queued_run(tmp_path / "runs", None, f"run{number}") for number in range(_MANY)]
    submission = runs[0].siblings.submission("t1")
    submission.folder.mkdir(parents=True)
    record = {"token": "t1", "created": "", "creator": None, "runs": ["run0"], "state": "released"}
    write_json(submission.record, record)
    programs = put_programs_first(tmp_path, monkeypatch)
    for name in ("sbatch", "squeue", "scontrol", "srun"):
        programs.put(name, "exit 1")
    launcher = SlurmLauncher()
    with launcher.submitting(runs[0].siblings):
        found: list[bool] = []
        work = work_of(lambda: found.extend(map(launcher.is_unsubmitted, runs)), monkeypatch)
    assert found == [False] + [True] * (_MANY - 1)
    assert sum(path.endswith("/submission.json") for path in work.opened) == 1


def _held(folder: Path, runs: int) -> list[RunPaths]:
    """Return queued runs, each of a submission of its own that is not complete."""
    found = [queued_run(folder, f"{number}", f"run{number}") for number in range(1, runs + 1)]
    for number, paths in enumerate(found, start=1):
        submission = paths.siblings.submission(f"t{number}")
        submission.folder.mkdir(parents=True)
        write_json(submission.record, {"job_id": str(number), "state": "submitted"})
    return found


def test_each_submission_is_read_once_for_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = put_programs_first(tmp_path, monkeypatch)
    separator = "\x1f"
    rows = "".join(
        separator.join([str(job), "PENDING", "JobHeldUser", "0", "N/A", "N/A", "0", "", "small", "x", "\n"])
        for job in range(1, _MANY + 1)
    )
    programs.put("squeue", f"printf '%s' '{rows}'")
    runs = _held(tmp_path / "runs", _MANY)
    work = work_of(lambda: statuses(runs), monkeypatch)
    assert sum(path.endswith("/submission.json") for path in work.opened) == _MANY


def _completed(folder: Path, runs: int) -> list[RunPaths]:
    """Return runs that Slurm has had; each was submitted alone."""
    found = [queued_run(folder, f"{number}", f"run{number:02}") for number in range(1, runs + 1)]
    for paths in found:
        write_status(paths, RunStatus("completed", 10, 10))
    return found


def test_remove_queries_the_queue_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = put_programs_first(tmp_path, monkeypatch)
    programs.put("squeue", "true")
    runs = _completed(runs_root(), _MANY)
    assert hpc_train("rm", "small", "--yes").code == 0
    assert len(programs.calls("squeue")) == 1
    assert not any(paths.folder.exists() for paths in runs)


@pytest.mark.parametrize(
    "command", [["status"], ["compare", "small"], ["clean", "small", "--yes"], ["cancel", "small"]], ids=str
)
def test_constant_work_per_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    put_programs_first(tmp_path, monkeypatch).put("squeue", "true")
    counts = []
    for runs in (4, 12, 20):
        monkeypatch.setenv("HPC_TRAIN_RUNS", str(tmp_path / f"of{runs}"))
        _completed(runs_root(), runs)
        counts.append(count_calls(lambda: hpc_train(*command)))
    first, second = counts[1] - counts[0], counts[2] - counts[1]
    # Threads and the garbage collector vary a little; work per pair of runs would double it.
    assert 0 < second < 1.1 * first, counts
