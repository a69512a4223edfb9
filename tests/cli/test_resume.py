from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.errors import TryAgainError
from hpc_train.launchers.base import StartRequest
from hpc_train.launchers.lookup import load_launcher
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import claim_attempt, newest_number
from hpc_train.run.checkpoints import set_aside
from hpc_train.run.create import effective_experiment
from hpc_train.run.find import find_runs
from hpc_train.run.run_status import RunStatus, read_status, write_status
from tests.cli.commands import hpc_train, python, stderr_of, succeeded
from tests.cli.files import write_images
from tests.cli.launchers import COMPLETING, FAILING, QUEUE, QUEUEING, REFUSING, queued, refusals, requests
from tests.run.runs import change_facts, change_record, record_of
from tests.run.test_checkpoints import write_checkpoint


@pytest.fixture
def failed(file: Path) -> RunPaths:
    """A run whose first attempt broke, on three devices."""
    hpc_train("submit", file, "--local", "--launcher", FAILING, "--devices", "3")
    (paths,) = find_runs([])
    return paths


def _resume(*arguments: str | Path) -> int:
    return hpc_train("resume", *arguments).code


def test_a_failed_run_continues_in_its_next_attempt_until_it_is_completed(failed: RunPaths) -> None:
    write_checkpoint(failed, 4, attempt=1)
    done = succeeded("resume", failed.folder.name, "--launcher", COMPLETING, "--json")
    assert f"{failed.folder.name}: attempt 2 continues from step 4; in {failed.folder}\n" in done.err
    assert json.loads(done.out)["runs"][0]["state"] == "completed"
    assert "completed already" in stderr_of(0, "resume", failed.folder)
    assert [request.attempt for request in requests] == [1, 2]


def test_a_run_whose_checkpoints_are_all_damaged_is_not_said_to_start_at_step_0(failed: RunPaths) -> None:
    write_checkpoint(failed, 4, attempt=1)
    set_aside(failed.checkpoint(4), "shard-00000.safetensors: differs from its hash")
    done = hpc_train("resume", failed.folder)
    assert f"{failed.folder.name}: attempt 2 finds no intact checkpoint; in {failed.folder}\n" in done.err
    again = f"exp.yaml --launcher {FAILING} --new` starts again at step 0\n"
    assert "  next        no checkpoint is intact: `hpc-train submit " in done.err
    assert done.err.endswith(again)
    assert "starts at step 0" not in done.err


def test_a_run_that_diverged_warns_that_it_will_again_unless_something_changes(failed: RunPaths) -> None:
    change_record(failed.attempt(1), cause="diverged", reason="loss is NaN at step 7")
    warning = "its last attempt diverged (loss is NaN at step 7)\n  resuming it unchanged"
    done = hpc_train("resume", failed.folder)
    assert f"{failed.folder.name}: {warning}" in done.err
    assert "  half the learning rate: `hpc-train submit " in done.err
    assert [request.attempt for request in requests] == [1, 2], "it resumes all the same"
    change_record(failed.attempt(2), cause="diverged")
    assert "would diverge" not in hpc_train("resume", failed.folder, "checkpoint.every_min=5").err


@pytest.mark.parametrize(
    ("options", "code", "devices"),
    [([], 1, 3), (["--devices", "2"], 1, 2), (["--launcher", COMPLETING], 0, None)],
)
def test_devices_of_a_resume(failed: RunPaths, options: list[str], code: int, devices: int | None) -> None:
    assert _resume(failed.folder, *options) == code
    assert [request.devices for request in requests] == [3, devices]


def test_a_change_of_what_is_learnt_is_refused(failed: RunPaths) -> None:
    done = hpc_train("resume", failed.folder, "optimization.optimizer.lr=0.5", "name=other")
    assert done.code == 2
    assert "optimization.optimizer.lr, name: would make" in done.err
    own = "optimization.optimizer.lr=0.5 name=other"
    assert f"exp.yaml {own} --launcher {FAILING}`" in done.err
    assert "model.init_from" not in done.err
    assert "would make" in stderr_of(2, "resume", failed.folder, "parallel.sync_batchnorm=true")
    write_checkpoint(failed, 5, attempt=1)
    done = hpc_train("resume", failed.folder, "optimization.epochs=9")
    assert f"exp.yaml optimization.epochs=9 model.init_from={failed.folder.name} --launcher" in done.err
    assert newest_number(failed) == 1


def test_changes_that_leave_the_run_what_it_is_are_noted_and_stay(failed: RunPaths) -> None:
    done = hpc_train("resume", failed.folder, "parallel.strategy=fsdp", "data.workers=2")
    assert "attempt 2 starts at step 0" in done.err
    assert "from now on with parallel.strategy=fsdp data.workers=2" in done.err
    assert _resume(failed.folder, "data.workers=1", "--launcher", COMPLETING) == 0
    assert [request.experiment.parallel.strategy for request in requests] == ["ddp", "fsdp", "fsdp"]
    assert [request.experiment.data.workers for request in requests] == [0, 2, 1]
    changes = json.loads(failed.run.read_text())["changes"]
    assert changes == {"2": ["parallel.strategy=fsdp", "data.workers=2"], "3": ["data.workers=1"]}


@pytest.mark.parametrize("again", [[], ["parallel.strategy=fsdp"]])
def test_changes_that_ranks_refused_are_dropped_unless_requested_again(
    failed: RunPaths, again: list[str]
) -> None:
    done = hpc_train("resume", failed.folder, "parallel.strategy=fsdp", "--launcher", REFUSING)
    assert done.code == 65
    way_on = f"`hpc-train resume {failed.folder.name}` omits parallel.strategy=fsdp and starts at step 0"
    assert way_on in done.err
    assert done.err.count("this model can't be cut") == 1, "not a second time in its state"
    done = hpc_train("resume", failed.folder, "--launcher", COMPLETING, *again)
    dropped = "omits parallel.strategy=fsdp, with which the last attempt was refused"
    assert (done.code, dropped in done.err, "omits" in done.err) == (0, not again, not again)
    last = "fsdp" if again else "ddp"
    assert [request.experiment.parallel.strategy for request in requests] == ["ddp", "fsdp", last]


def test_a_change_that_cannot_be_started_leaves_the_run_alone(failed: RunPaths) -> None:
    assert _resume(failed.folder, "parallel={strategy: tensor, tensor: 2}") == 65
    assert _resume(failed.folder, "--devices", "5") == 65
    assert newest_number(failed) == 1


@pytest.mark.parametrize("options", [[], ["--take-over"]])
def test_a_run_whose_launcher_lives_is_refused(failed: RunPaths, options: list[str]) -> None:
    claim_attempt(failed, "local")  # by this process
    write_status(failed, RunStatus(state="running", attempt=2))
    assert f"process {os.getpid()}" in stderr_of(1, "resume", failed.folder, *options)
    assert (len(requests), newest_number(failed)) == (1, 2)


def test_an_unsafe_run_loads_nothing(
    failed: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted_launcher.py").write_text("raise SystemExit('planted')\n")
    monkeypatch.syspath_prepend(tmp_path)
    change_facts(failed, launcher="planted_launcher:Launcher")
    failed.folder.chmod(0o770)
    assert "`chmod go-w" in stderr_of(1, "resume", failed.folder)
    assert "planted_launcher" not in sys.modules


def test_of_two_that_start_at_once_the_later_gives_way(failed: RunPaths) -> None:
    claim_attempt(failed)
    with pytest.raises(TryAgainError, match="another command has just started it"):
        request = StartRequest(failed, effective_experiment(failed, 1), after=1)
        load_launcher(COMPLETING).start(failed.siblings, [request])
    assert newest_number(failed) == 2


def test_the_second_of_two_resumes_changes_nothing(failed: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """The winner's ranks read run.json and the code link, and end where a newer attempt exists."""
    Path("new.py").write_text("")
    code, facts = failed.code.readlink(), failed.run.read_text()

    def claim_first(paths: RunPaths, **options: bool) -> None:
        claim_attempt(paths)  # the winner, after the loser has seen that attempt 1 has ended

    monkeypatch.setattr("hpc_train.cli.resume.end_living", claim_first)
    done = hpc_train("resume", failed.folder, "data.workers=2", "--code", "new")
    assert (done.code, "another command has just started it" in done.err) == (75, True)
    assert failed.code.readlink() == code and failed.run.read_text() == facts
    assert sorted(path.name for path in failed.attempts.iterdir()) == ["1", "2"]


def _on_a_machine_that_is_gone(paths: RunPaths, silent_min: float) -> None:
    """Leave the run as a host leaves it that vanishes while it trains."""
    number = claim_attempt(paths, "local")
    process = record_of(paths.attempt(number)).launcher_process
    assert process is not None
    there = replace(process, host="spot-7", boot_id="another")
    change_record(paths.attempt(number), launcher_process=there)
    paths.attempt(number).heartbeat("spot-7").write_text("{}")
    write_status(paths, RunStatus("running", 4, 9, attempt=number))
    change_facts(paths, launcher="local")
    then = time.time() - 60 * silent_min
    for path in (paths.status, *paths.attempt(number).folder.iterdir()):
        os.utime(path, (then, then))


@pytest.mark.parametrize("command", ["resume", "cancel", "clean"])
def test_a_run_whose_machine_is_gone_is_over_after_ten_silent_minutes(failed: RunPaths, command: str) -> None:
    option = {"resume": ["--launcher", COMPLETING], "clean": ["--yes"]}.get(command, [])
    _on_a_machine_that_is_gone(failed, 2)
    refused = hpc_train(command, failed.folder, *option)
    assert refused.code == 1
    assert command != "cancel" or "once it has been silent for 10 min" in refused.err
    _on_a_machine_that_is_gone(failed, 11)
    assert "failed" in hpc_train("status", failed.folder).out
    assert read_status(failed).state == "running", "it may only be cut off"
    assert hpc_train(command, failed.folder, *option).code == 0
    states = {"resume": "completed", "cancel": "cancelled", "clean": "running"}
    assert read_status(failed).state == states[command]


def test_a_run_whose_machine_is_gone_can_be_submitted_again(failed: RunPaths, file: Path) -> None:
    _on_a_machine_that_is_gone(failed, 60 * 24 * 3)
    write_checkpoint(failed, 4, attempt=2)
    error = stderr_of(1, "submit", file, "--local", "--launcher", FAILING)
    assert "failed (no sign of life from spot-7 for 3 days)" in error
    assert f"`hpc-train resume {failed.folder.name}` continues from step 4" in error


def test_a_run_with_a_recent_heartbeat_needs_the_named_option_to_resume(failed: RunPaths) -> None:
    _on_a_machine_that_is_gone(failed, 2)
    error = stderr_of(1, "resume", failed.folder, "--launcher", COMPLETING)
    assert "may still run on spot-7 (last sign of life 2 min ago)" in error
    assert f"`hpc-train resume {failed.folder.name} --take-over`" in error
    assert newest_number(failed) == 2
    assert hpc_train("resume", failed.folder, "--take-over", "--launcher", COMPLETING).code == 0
    assert requests[-1].attempt == 3


def test_all_runs_of_an_experiment_continue(file: Path) -> None:
    hpc_train("submit", file, "--local", "--launcher", FAILING, "sweep.grid={seed: [1, 2]}")
    assert _resume("tiny", "--launcher", COMPLETING) == 0
    assert [request.attempt for request in requests] == [1, 1, 2, 2]


def test_changes_of_an_active_run_are_checked_and_lead_to_cancel_and_resume(file: Path) -> None:
    hpc_train("submit", file, "--launcher", QUEUE)
    (paths,) = find_runs([])
    run = paths.folder.name
    error = stderr_of(1, "resume", run, "slurm.time_limit=2h")
    assert f"`hpc-train cancel {run} && hpc-train resume {run} slurm.time_limit=2h`" in error
    assert "to apply" not in hpc_train("resume", run).err
    assert hpc_train("resume", run, "slurm.time_limit=soon").code == 65
    assert "seed: would make" in stderr_of(2, "resume", run, "seed=5")
    assert len(queued) == 1


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["seed=1"], "resume: names no run"),
        (["nonsense"], "no run or experiment of this name"),
        (["exp.yaml"], "`hpc-train submit exp.yaml` starts its runs"),
        (["tiny", "data.workers", "=", "2"], "data.workers is a key; write data.workers=VALUE"),
        (["tiny", "steps=30"], "did you mean optimization.steps?"),
    ],
)
def test_words_that_are_no_run_and_no_key_lead_on(
    failed: RunPaths, file: Path, words: list[str], remedy: str
) -> None:
    shutil.copy(file, "exp.yaml")
    done = hpc_train("resume", *words)
    assert done.code in {2, 65} and remedy in done.err
    assert newest_number(failed) == 1


@pytest.mark.slow
@pytest.mark.parametrize("state", ["pending", "running"])
def test_a_run_that_another_launcher_has_queued_is_refused(failed: RunPaths, state: str) -> None:
    """The command that queued it is dead, as it should be."""
    done = python("-m", "hpc_train", "resume", failed.folder, "--launcher", QUEUEING)
    assert (done.code, "queued" in done.err) == (0, True), done.err
    write_status(failed, RunStatus(state=state, attempt=2))
    assert f"is {state} with launcher {QUEUEING}" in stderr_of(1, "resume", failed.folder)
    assert read_status(failed).state == state
    assert newest_number(failed) == 2


@pytest.fixture
def cancelled(file: Path) -> list[RunPaths]:
    """Two runs of a queue that somebody cancelled."""
    hpc_train("submit", file, "--launcher", QUEUE, "sweep.grid={seed: [1, 2]}")
    runs = find_runs([])
    for paths in runs:
        write_status(paths, RunStatus("cancelled", reason="hpc-train cancel"))
        paths.cancelled.write_text("{}")
    return runs


def test_runs_of_a_queue_enter_it_again_at_once_with_their_changes(cancelled: list[RunPaths]) -> None:
    done = succeeded("resume", "tiny", "slurm.nodes=3", "data.workers=2")
    assert [run.paths for run in queued[-1]] == cancelled
    assert [run.experiment.data.workers for run in queued[-1]] == [2, 2]
    slurm = queued[-1][0].experiment.slurm
    assert slurm is not None and slurm.nodes == 3
    assert "attempt 1 starts at step 0" in done.err
    assert not any(paths.cancelled.exists() for paths in cancelled)
    assert [read_status(paths).state for paths in cancelled] == ["pending", "pending"]


def test_a_run_that_has_used_its_gpu_hours_is_resumed_with_more_only(cancelled: list[RunPaths]) -> None:
    run = cancelled[0]
    number = claim_attempt(run, QUEUE, job="7", hosts=["n1", "n2"])
    began, ended = "2026-11-01T00:00:00+00:00", "2026-11-01T03:00:00+00:00"
    change_record(run.attempt(number), start=began, end=ended)
    write_status(run, RunStatus("cancelled", attempt=number))
    budget = ("slurm.gpus_per_node=4", "slurm.max_gpu_hours=24")
    done = hpc_train("resume", run.folder, *budget)
    assert done.code == 65 and "24 GPU-hours are used up: the run's attempts took 24; raise it" in done.err
    assert _resume(run.folder, "slurm.gpus_per_node=4", "slurm.max_gpu_hours=25") == 0


def test_changes_of_an_attempt_that_never_began_stay(cancelled: list[RunPaths]) -> None:
    assert _resume(cancelled[0].folder, "data.workers=2", "slurm.nodes=3") == 0
    write_status(cancelled[0], RunStatus("cancelled"))
    assert _resume(cancelled[0].folder, "data.workers=1") == 0
    experiment = queued[-1][0].experiment
    assert experiment.data.workers == 1
    assert experiment.slurm is not None and experiment.slurm.nodes == 3


def test_what_a_queue_refuses_leaves_runs_as_they_were(cancelled: list[RunPaths]) -> None:
    files = [path for run in cancelled for path in (run.run, run.status, run.cancelled)]
    before = [path.read_text() for path in files]
    assert "--devices: is for this machine" in stderr_of(2, "resume", "tiny", "--devices", "2")
    refusals.append("slurm.nodes: too many")
    assert "slurm.nodes: too many" in stderr_of(65, "resume", "tiny", "slurm.nodes=3")
    assert [path.read_text() for path in files] == before


def test_a_queued_run_is_refused_and_an_unsubmitted_run_is_not(cancelled: list[RunPaths]) -> None:
    for paths in cancelled:
        write_status(paths, RunStatus("pending"))
    (cancelled[1].folder / "unsubmitted").touch()
    assert "is pending on a queue; `hpc-train cancel" in stderr_of(1, "resume", "tiny")
    assert [run.paths for run in queued[-1]] == [cancelled[1]]


def test_a_run_of_a_queue_continues_here_and_back(cancelled: list[RunPaths]) -> None:
    run = cancelled[0]
    assert _resume(run.folder, "--launcher", FAILING) == 1
    assert not run.cancelled.exists()
    assert json.loads(run.run.read_text())["launcher"] == FAILING
    assert _resume(run.folder) == 1, "on the launcher that it had last"
    assert [request.attempt for request in requests] == [1, 2]
    assert _resume(run.folder, "--launcher", QUEUE) == 0
    assert queued[-1][0].paths == run


def test_slurm_needs_its_section(failed: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_train.launchers.slurm.sbatch.check_programs", lambda: None)
    assert "slurm: is missing" in stderr_of(65, "resume", failed.folder, "--launcher", "slurm")


def test_the_throttle_may_change(cancelled: list[RunPaths]) -> None:
    assert _resume("tiny", "sweep.max_parallel=1") == 0
    assert [run.experiment.sweep.max_parallel for run in queued[-1]] == [1, 1]
    write_status(cancelled[0], RunStatus("cancelled"))
    assert _resume(cancelled[0].folder, "sweep.grid={seed: [3]}") == 2
    assert _resume(cancelled[0].folder, "sweep.list=[{seed: 3}]") == 2


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders of other images."""
    return write_images(tmp_path / "one"), write_images(tmp_path / "two", classes=3)


def _on_images(file: Path, root: Path, launcher: str = FAILING) -> RunPaths:
    data = f"data={{name: imagefolder, root: {root}, image_size: 32}}"
    done = hpc_train("submit", file, "--launcher", launcher, data, "model.name=timm/resnet18")
    assert find_runs([]), done.err
    return find_runs([])[0]


def test_a_run_is_not_resumed_on_other_data(file: Path, roots: tuple[Path, Path], tmp_path: Path) -> None:
    run = _on_images(file, roots[0])
    write_checkpoint(run, 3, attempt=1)
    error = stderr_of(65, "resume", run.folder, f"data.root={roots[1]}", "--launcher", COMPLETING)
    assert f"data.root: the files are not those that {run.folder.name} was trained on so far" in error
    shutil.move(roots[0], tmp_path / "moved")
    assert f"data.root: {roots[0]} does not exist on this machine" in stderr_of(65, "resume", run.folder)
    assert newest_number(run) == 1
    assert _resume(run.folder, f"data.root={tmp_path / 'moved'}", "--launcher", COMPLETING) == 0


def test_a_run_whose_data_have_another_layout_is_not_resumed(file: Path, roots: tuple[Path, Path]) -> None:
    root = roots[0]
    run = _on_images(file, root, QUEUE)
    write_status(run, RunStatus("cancelled"))
    shutil.rmtree(root / "train")
    assert f"data.root: {root} has no folder train" in stderr_of(65, "resume", run.folder)
    shutil.rmtree(root)
    root.mkdir()  # only the nodes mount it
    assert hpc_train("resume", run.folder).code == 0


def test_a_run_that_saved_nothing_may_begin_on_other_data(file: Path, roots: tuple[Path, Path]) -> None:
    """Its folder was wrong, say: submitted again, it is the run of the data that it was trained on."""
    run = _on_images(file, roots[0])
    assert _resume(run.folder, f"data.root={roots[1]}", "--launcher", COMPLETING) == 0
    for root, message in zip(roots, ("of other files than data.root", "completed already"), strict=True):
        data = f"data={{name: imagefolder, root: {root}, image_size: 32}}"
        done = hpc_train("submit", file, "--launcher", COMPLETING, data, "model.name=timm/resnet18")
        assert message in done.err
