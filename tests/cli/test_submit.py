from __future__ import annotations

import json
import shlex
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.cli.run_row import RunRow
from hpc_train.cli.starting import say_end
from hpc_train.errors import ExitCode
from hpc_train.experiment.config.training_sections import ProfileConfig
from hpc_train.experiment.plan.sweep import run_id
from hpc_train.launchers.base import JobForecast, KeyProblem
from hpc_train.paths import RunPaths, runs_root
from hpc_train.run.attempts import tell_error
from hpc_train.run.bad_samples import BadSample, append
from hpc_train.run.create import create_run
from hpc_train.run.find import find_runs
from hpc_train.run.frozen_experiment import read
from hpc_train.run.run_status import RunStatus, read_status, write_status
from tests.cli.commands import Done, hpc_train, python, stderr_of, succeeded
from tests.cli.files import write_images
from tests.cli.launchers import (
    BROKEN,
    COMPLETING,
    CTRL_C,
    FAILING,
    INTERRUPTED,
    LEAVING,
    LEAVING_AT_ONCE,
    QUEUE,
    QUEUEING,
    RAISING,
    REFUSING,
    SAVING,
    Queue,
    queued,
    requests,
)
from tests.plan.files import loaded
from tests.run.runs import change_record, record_of, write_rows
from tests.run.test_checkpoints import write_checkpoint


def _submit(file: Path, *arguments: str, launcher: str = COMPLETING) -> Done:
    return hpc_train("submit", file, "--local", "--launcher", launcher, *arguments)


def _queue(file: Path, *arguments: str) -> Done:
    return hpc_train("submit", file, "--launcher", QUEUE, *arguments)


def _failed(file: Path, *arguments: str, step: int | None = None) -> RunPaths:
    """Return the first run of a submit that fails, with a checkpoint of ``step``."""
    assert _submit(file, *arguments, launcher=FAILING).code == 1
    paths = find_runs([])[0]
    if step is not None:
        write_checkpoint(paths, step, attempt=1)
    return paths


_NO_SLURM = "1:1: slurm: is missing, so there are no resources to request from Slurm; write `slurm: {}` for "


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], _NO_SLURM),
        (["--launcher", "slurm"], _NO_SLURM),
        (["--dry-run"], _NO_SLURM),
        (["--local", "--devices", "5"], "9:21: optimization.micro_batch_size: needs at most 4 ranks"),
    ],
)
def test_what_can_not_start_is_refused_before_anything_is_made(
    file: Path, options: list[str], message: str
) -> None:
    assert f"{file}:{message}" in stderr_of(65, "submit", file, *options)
    assert not runs_root().exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--launcher", "slurm", "--local"], "--local: is for this machine, launcher slurm is not"),
        (["--launcher", "slurm", "--devices", "2"], "--devices: is for this machine, launcher slurm is not"),
        (["--devices", "2", "--dry-run"], "--devices: is for this machine; add --local"),
        (["slurm={}", "--jobs", "2"], "--jobs: is for this machine; add --local"),
        (["--local", "--launcher", "locl"], "did you mean local?"),
    ],
)
def test_options_that_exclude_each_other(file: Path, options: list[str], message: str) -> None:
    assert message in stderr_of(2, "submit", file, *options)


def test_a_dry_run_for_slurm_shows_the_script_of_each_job(file: Path) -> None:
    sweep = ("sweep.grid={seed: [1, 2]}", "slurm={nodes: 2, time_limit: 1h}")
    done = succeeded("submit", file, "--dry-run", *sweep)
    assert done.out.count("#!/bin/bash") == 1
    assert "#SBATCH --array=0-1%2" in done.out
    plan = json.loads(hpc_train("submit", file, "--dry-run", "--json", *sweep).out)
    (script,) = plan["scripts"]
    assert script.strip() in done.out and [run["ranks"] for run in plan["runs"]] == [2, 2]
    assert not runs_root().exists()


def test_all_new_runs_enter_the_queue_at_once(file: Path) -> None:
    assert _queue(file, "seed=8").code == 0
    done = _queue(file, "sweep.grid={seed: [7, 8, 9]}", "--json")
    assert done.code == 0
    assert [[run.experiment.seed for run in runs] for runs in queued] == [[8], [7, 9]]
    assert [run["state"] for run in json.loads(done.out)["runs"]] == ["pending"] * 3
    assert done.err.count("pending already") == 1
    assert "`hpc-train status tiny`" in done.err
    assert all(paths.code.is_symlink() for paths in find_runs([]))


@pytest.mark.parametrize("start", [_submit, _queue])
def test_new_runs_start_beside_existing_runs(file: Path, start: Callable[..., Done]) -> None:
    for _ in range(3):
        assert start(file, "--new").code == 0
    names = [paths.folder.name for paths in find_runs([])]
    assert names == [names[0], f"{names[0]}-2", f"{names[0]}-3"]
    assert [RunRow.of(paths).id for paths in find_runs([])] == names
    assert [[run.paths.folder.name for run in runs] for runs in queued] == [
        [name] for name in names if start is _queue
    ]


@pytest.mark.parametrize("option", [[], ["--new"]])
def test_a_run_that_never_reached_the_queue_is_made_again(file: Path, option: list[str]) -> None:
    for _ in range(1 + len(option)):
        _queue(file, *option)
    paths = find_runs([])[-1]
    (paths.folder / "unsubmitted").touch()
    before = json.loads(paths.run.read_text())["wandb_id"]
    assert _queue(file, *option).code == 0
    assert find_runs([])[-1] == paths
    assert json.loads(paths.run.read_text())["wandb_id"] != before
    assert queued[-1][0].paths == paths


def test_data_that_only_the_nodes_have_are_a_warning_in_a_queue(file: Path) -> None:
    done = _queue(file, "data.root=/nowhere")
    assert done.code == 0
    assert "data.root: /nowhere does not exist on this machine; make sure that the nodes have it" in done.err


@pytest.mark.parametrize(("source", "said"), [("nope", "no run"), ("w.pth", "there is no file w.pth; write")])
def test_weights_that_do_not_exist_are_reported_at_their_key(file: Path, source: str, said: str) -> None:
    for done in (
        _submit(file, f"model.init_from={source}"),
        hpc_train("validate", file, f"model.init_from={source}"),
    ):
        assert done.code == ExitCode.BAD_FILE
        assert done.err.startswith("command line: model.init_from: ") and said in done.err


def test_a_root_of_another_layout_is_refused_but_not_an_empty_one(file: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    overrides = (f"data={{name: imagefolder, root: {tmp_path / 'data'}}}", "model.name=timm/resnet18")
    assert _queue(file, *overrides).code == 0
    (tmp_path / "data" / "val").mkdir()
    for done in (_queue(file, *overrides, "--new"), hpc_train("validate", file, *overrides)):
        assert done.code == ExitCode.BAD_FILE
        assert f"data.root: {tmp_path / 'data'} has no folder train (it contains val); the images" in done.err


def test_a_failed_run_of_a_queue_names_what_the_file_asks_of_slurm_by_now(file: Path) -> None:
    _queue(file, "slurm={nodes: 1, partition: a}")
    (paths,) = find_runs([])
    write_checkpoint(paths, 5, attempt=0)
    write_status(paths, RunStatus("failed", reason="job 12: out of memory"))
    done = _queue(file, "slurm={nodes: 1, partition: b}")
    assert done.code == 1
    assert f"`hpc-train resume {paths.folder.name} slurm.partition=b`" in done.err


def test_a_run_is_made_and_ends_with_where_everything_is(file: Path, tmp_path: Path) -> None:
    done = _submit(file, "--devices", "2")
    (paths,) = find_runs([])
    assert done.code == 0
    assert paths.folder == runs_root() / "tiny" / run_id(loaded(tmp_path).experiment)
    assert done.out == f"{paths.folder.name}  completed  5/9  {paths.folder}\n"
    assert done.err.splitlines()[-4:] == [
        f"{paths.folder.name}: completed at step 5/9",
        "  last val    step 5: loss 0.5 accuracy 0.75 (the best)",
        f"  run folder  {paths.folder}",
        f"  metrics     {paths.metrics}",
    ]
    (request,) = requests
    assert (request.attempt, request.devices) == (1, 2)
    again = _submit(file)
    assert (again.code, "completed already" in again.err, len(requests)) == (0, True, 1)


@pytest.mark.parametrize(
    ("override", "best"),
    [
        ("seed=1", "step 3: loss 0.9 accuracy 0.8"),
        ("checkpoint.best={metric: loss, mode: min}", "step 4: loss 0.4 accuracy 0.7"),
        ("early_stopping={metric: loss, mode: min, patience: 3}", "step 4: loss 0.4 accuracy 0.7"),
    ],
)
def test_the_best_evaluation_is_by_the_selected_metric(file: Path, override: str, best: str) -> None:
    paths = _failed(file, override)
    values = {3: (0.9, 0.8), 4: (0.4, 0.7), 5: (0.5, 0.75)}
    rows = [{"split": "val", "step": step, "loss": a, "accuracy": b} for step, (a, b) in values.items()]
    write_rows(paths, rows)
    done = _submit(file, override, launcher=FAILING)
    assert f"\n  best val    {best}\n" in done.err


def test_a_saved_run_prints_next_steps(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = _failed(file)
    name = paths.folder.name
    fix = "fix the cause and submit the file again: the run then uses the current code and file"
    assert f"\n  next        {fix}\n" in _submit(file, launcher=FAILING).err
    write_checkpoint(paths, 5, attempt=2)
    monkeypatch.chdir(tmp_path)
    done = hpc_train("resume", paths.folder, "--launcher", COMPLETING)
    folder = paths.folder.relative_to(tmp_path)
    next_step = f"`hpc-train export {name} -o weights.safetensors` writes its weights"
    assert f"\n  run folder  {folder}\n" in done.err and done.err.endswith(f"\n  next        {next_step}\n")


def test_unreadable_samples_are_named_also_by_status(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _submit(file)
    (paths,) = find_runs([])
    bad = [BadSample("train", number, f"{number}.jpg", "truncated") for number in (7, 8)]
    append(paths.attempt(1).bad_samples(0), bad)
    say_end(paths, ExitCode.DONE)
    shown = "bad samples  sample 7 (7.jpg): truncated and 1 more sample\n"
    assert shown in capsys.readouterr().err
    assert shown in hpc_train("status", paths.folder.name).out


def test_a_profiled_run_ends_with_what_limits_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _submit(file, "--profile")
    (paths,) = find_runs([])
    assert read(paths).profile == ProfileConfig(after_steps=10, steps=5)
    table = paths.attempt(1).profile_table
    table.parent.mkdir(parents=True, exist_ok=True)
    hint = "limited by: input; to go faster raise data.workers\n"
    table.write_text(f"5 steps of rank 0\n{hint}\nName  Self CPU\n")
    say_end(paths, ExitCode.FAILED)
    assert f"\n  profile     {table}\n              {hint}" in capsys.readouterr().err


def test_a_run_that_somebody_is_starting_is_not_started_again(file: Path, tmp_path: Path) -> None:
    experiment = loaded(tmp_path).experiment
    folder = runs_root() / "tiny" / run_id(experiment)
    create_run(RunPaths(folder), experiment, folder.name, 9)  # by this living process
    done = _submit(file)
    assert done.code == 0
    assert "pending already" in done.err
    assert not requests


@pytest.fixture
def active(file: Path) -> RunPaths:
    """A run that runs in a queue."""
    _queue(file, "slurm.nodes=1")
    (paths,) = find_runs([])
    write_status(paths, replace(read_status(paths), state="running"))
    return paths


def test_what_the_file_changes_in_a_run_that_runs_is_said_with_the_commands_that_apply_it(
    active: RunPaths, file: Path
) -> None:
    changes = ("slurm.nodes=1", "slurm.time_limit=90min", "environment.modules=[cuda]", "data.workers=3")
    done = _queue(file, *changes)
    run = active.folder.name
    assert done.code == 0 and f"{run}: running already" in done.err
    assert "  slurm.time_limit absent → 90min\n" in done.err
    assert "  data.workers 0 → 3\n" in done.err
    (line,) = [line for line in done.err.splitlines() if "to apply them" in line]
    cancel, resume = line.partition("`")[2].rstrip("`").split(" && ")
    for command in (cancel, resume):
        assert hpc_train(*shlex.split(command)[1:]).code == 0
    experiment = queued[-1][0].experiment
    assert experiment.slurm is not None and experiment.slurm.time_limit == 90
    assert (experiment.data.workers, experiment.environment.modules) == (3, ["cuda"])
    write_status(active, replace(read_status(active), state="running"))
    assert "to apply them" not in _queue(file, *changes).err


def test_changes_that_the_queue_refuses_are_an_error_of_the_file(
    active: RunPaths, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = KeyProblem("slurm.nodes", "3 exceeds the 2 nodes of partition short", "write 2")
    answer = [JobForecast([active], problems=[problem])]
    monkeypatch.setattr(Queue, "forecast", lambda self, folder, runs: answer, raising=False)
    done = _queue(file, "slurm.nodes=3")
    assert done.code == 65
    assert "the queue would not start it:" in done.err and "partition short; write 2" in done.err
    assert "to apply" not in done.err


def test_a_run_that_failed_before_it_saved_takes_the_fixed_code_and_file(file: Path) -> None:
    """Else the error that was fixed would come again: the run keeps the code of its first submit."""
    Path("model.py").write_text("broken = True\n")
    paths = _failed(file)
    Path("model.py").write_text("broken = False\n")
    done = _submit(file, "data.workers=2")
    assert done.code == 0, done.err
    assert "before it saved anything; starts again with the current code and file" in done.err
    assert "1 file differs: model.py" in done.err
    assert find_runs([]) == [paths]
    assert [request.attempt for request in requests] == [1, 2]
    assert requests[-1].experiment.data.workers == 2
    assert (paths.code / "tree/model.py").read_text() == "broken = False\n"


def test_a_run_that_starts_again_is_not_resumed_at_once_when_it_is_stopped(file: Path) -> None:
    _failed(file)
    done = _submit(file, launcher=SAVING)
    assert done.code == 130
    assert [request.attempt for request in requests] == [1, 2]


def test_runs_of_a_queue_that_failed_before_they_saved_enter_it_again(file: Path) -> None:
    sweep = "sweep.grid={seed: [1, 2, 3]}"
    _queue(file, sweep)
    first, second, third = find_runs([])
    for paths in (first, second):
        write_status(paths, RunStatus("failed", reason="rank 0: it broke"))
    write_status(third, RunStatus("cancelled"))
    Path("model.py").write_text("")
    done = _queue(file, sweep)
    assert done.code == 1, "the cancelled one is not started"
    assert [{run.paths for run in runs} for runs in queued[1:]] == [{first, second}]
    assert (first.code / "tree/model.py").exists() and not (third.code / "tree/model.py").exists()


def test_a_failed_run_names_the_ways_on_and_in_the_users_code_the_fixed_code(file: Path) -> None:
    paths = _failed(file, step=4)
    code = paths.code.resolve()
    tell_error(paths.attempt(1), 0, f'  File "{code}/package/hpc_train/a.py", line 3, in f\nOSError\n')
    done = _submit(file)
    assert (done.code, len(requests)) == (1, 1)
    assert f"`hpc-train resume {paths.folder.name}` continues from step 4" in done.err
    assert "--new" in done.err and "--code new" not in done.err, "the error is not in it"
    frames = f"""Traceback (most recent call last):
  File "{code}/package/hpc_train/training/forward.py", line 3, in forward
    return self.model(images)
  File "{code}/tree/nets/small.py", line 12, in forward
    return torch.cat([x, y])
RuntimeError: sizes differ
"""
    tell_error(paths.attempt(1), 0, frames)
    done = _submit(file)
    resume = f"`hpc-train resume {paths.folder.name} --code new` continues from step 4"
    assert f"the error is in your code, nets/small.py:12: fix it, then {resume}" in done.err
    assert hpc_train("resume", paths.folder, "--code", "new", "--launcher", COMPLETING).code == 0


def test_a_diverged_run_names_what_to_change_in_commands_that_can_be_pasted(file: Path) -> None:
    sweep = "sweep.grid={optimization.optimizer.lr: [0.5], seed: [1, 2]}"
    paths = _failed(file, sweep, "data.workers=1", step=4)
    change_record(paths.attempt(1), cause="diverged")
    said = _submit(file, sweep, "data.workers=1", launcher=FAILING).err
    assert "would diverge again" in said and f"`hpc-train resume {paths.folder.name}`" not in said
    halved, clipped, skipped = [
        shlex.split(line.split("`")[1]) for line in said.splitlines() if "`hpc-train submit" in line
    ]
    for command in (halved, clipped, skipped):
        assert hpc_train(*command[1:]).code == 1, "the launcher of this run fails"
    rates = [request.experiment.optimization.optimizer.lr for request in requests[-3:]]
    assert rates == [0.25, 0.5, 0.5]
    assert requests[-2].experiment.optimization.clip_grad_norm == 1.0
    assert requests[-1].experiment.optimization.on_non_finite == "skip"
    assert {request.experiment.seed for request in requests[-3:]} == {read(paths).seed}
    assert len({request.paths for request in requests}) == 5


def test_a_refused_run_continues_from_its_checkpoints_if_it_has_any(file: Path) -> None:
    done = _submit(file, launcher=REFUSING)
    assert (done.code, "fix the cause and submit the file again" in done.err) == (65, True)
    (paths,) = find_runs([])
    write_checkpoint(paths, 5, attempt=1)
    done = hpc_train("resume", paths.folder)
    way_on = f"`hpc-train resume {paths.folder.name}` continues from step 5"
    assert f"fix what the message names, then {way_on}" in done.err


def test_the_runs_of_a_sweep_follow_each_other(file: Path) -> None:
    done = _submit(file, "sweep.grid={seed: [7, 8, 9]}", "--json")
    assert done.code == 0
    assert [request.experiment.seed for request in requests] == [7, 8, 9]
    data = json.loads(done.out)
    assert data["version"] == 1
    assert [run["id"] for run in data["runs"]] == [request.paths.folder.name for request in requests]
    assert read(requests[1].paths).seed == 8


def test_a_sweep_ends_as_its_worst_run_and_starts_only_what_is_missing(file: Path) -> None:
    _failed(file, "seed=8", step=5)
    done = _submit(file, "sweep.grid={seed: [7, 8]}")
    assert done.code == 1
    assert [request.experiment.seed for request in requests] == [8, 7]


def test_ctrl_c_ends_the_whole_sweep(file: Path) -> None:
    done = _submit(file, "sweep.grid={seed: [7, 8, 9]}", launcher=INTERRUPTED)
    assert done.code == 130
    assert len(requests) == 1
    assert "2 more runs were not started" in done.err


@pytest.mark.slow
def test_a_queued_run_is_said_to_be_queued_and_outlives_its_command(file: Path) -> None:
    done = python("-m", "hpc_train", "submit", file, "--launcher", QUEUEING)
    assert done.code == 0, done.err
    (paths,) = find_runs([])
    assert f"{paths.folder.name}: queued\n" in done.err
    assert f"`hpc-train status {paths.folder.name}`" in done.err
    assert "pending" in done.out
    record = record_of(paths.attempt(1))
    assert record.launcher == QUEUEING
    assert RunRow.of(paths).state == "pending"
    done = _submit(file)
    assert (done.code, "pending already" in done.err) == (0, True)


def test_an_end_that_the_launcher_did_not_write_is_written(file: Path) -> None:
    assert _submit(file, launcher=BROKEN).code == 1
    (paths,) = find_runs([])
    status = read_status(paths)
    assert (status.state, status.attempt, status.reason) == ("failed", 1, f"launcher {BROKEN}: exit code 1")


def test_an_error_of_a_users_launcher_is_shown_with_the_users_frames(file: Path) -> None:
    done = _submit(file, launcher=RAISING)
    lines = done.err.splitlines()
    assert done.code == 1 and len(lines) <= 15
    assert any("launchers.py" in line and line.endswith("in __init__") for line in lines), done.err
    assert lines[-2:] == [
        "KeyError: 'site'",
        "a plug-in of yours raised this when hpc-train loaded or called it; fix it there",
    ]


@pytest.mark.parametrize("launcher", [LEAVING, LEAVING_AT_ONCE])
def test_a_launcher_that_ends_the_process_does_not_exit_0(launcher: str, file: Path) -> None:
    done = _submit(file, launcher=launcher)
    assert done.code == 65
    assert "calls sys.exit(0)" in done.err
    states = {read_status(paths).state for paths in find_runs([])} if launcher == LEAVING else {"failed"}
    assert states == {"failed"}


def test_ctrl_c_before_the_launcher_handles_it_is_interrupted(file: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert _submit(file, launcher=CTRL_C).code == 130
    finally:
        signal.signal(signal.SIGINT, before)
    (paths,) = find_runs([])
    assert (read_status(paths).state, read_status(paths).reason) == ("interrupted", "stopped by Ctrl-C")


def test_what_the_file_says_otherwise_by_now_is_in_the_command_to_go_on_with(file: Path) -> None:
    paths = _failed(file, "data.root=/", step=5)
    changed = file.parent / "my data"
    changed.mkdir()
    changes = [f"data.root={changed}", "data.workers=2", "checkpoint.every_min=3.0", "logging.every_steps=5"]
    done = _submit(file, *changes, "slurm={nodes: 1}")
    assert done.code == 1
    command = shlex.split(done.err.split("`")[1])
    assert command[:3] == ["hpc-train", "resume", paths.folder.name]
    assert sorted(command[3:]) == sorted(changes)
    assert hpc_train(*command[1:], "--launcher", COMPLETING).code == 0
    assert requests[-1].experiment.data.root == str(changed)
    assert requests[-1].experiment.data.workers == 2


@pytest.mark.slow
@pytest.mark.fault(31)
@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("auto", "runs log into their folders"),
        ("online", "wandb gets nothing of the runs"),
        ("offline", None),
    ],
)
@pytest.mark.parametrize("launcher", [["--local", "--launcher", COMPLETING], ["--launcher", QUEUE]])
def test_that_there_is_no_api_key_is_said_at_submit(
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launcher: list[str],
    mode: str,
    told: str | None,
) -> None:
    for variable in ("NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(file.parent / "none"))
    asked = f"logging.wandb={{project: x, mode: {mode}}}"
    done = succeeded("submit", file, asked, *launcher)
    assert ("there is no API key" in done.err) == (told is not None)
    message = f"command line: logging.wandb.mode: there is no API key, so {told}; set WANDB_API_KEY"
    assert told is None or message in done.err
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    done = hpc_train("submit", file, asked, *launcher, "--new")
    assert "API key" not in done.err and "secret" not in done.err


@pytest.mark.fault(45)
@pytest.mark.parametrize("launcher", [COMPLETING, QUEUEING])
def test_run_files_hold_no_secret(file: Path, monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    """Of the environment, and of files beside the code; whichever file would hold it."""
    planted = "planted-4f1d9c27"
    for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MY_OWN_VARIABLE"):
        monkeypatch.setenv(name, planted)
    for name in (".env.yaml", "token.yaml", "api_key.yaml", "password.yaml"):
        Path(name).write_text(planted)
    Path("key.py").write_text(f"KEY = '-----BEGIN PRIVATE KEY-----\\n{planted}'\n")
    Path("own.py").touch()
    done = succeeded("submit", file, "--launcher", launcher)
    for name in (".env.yaml", "token.yaml", "api_key.yaml", "password.yaml", "key.py"):
        assert name in done.err
    files = [path for path in runs_root().rglob("*") if path.is_file()]
    assert {"run.json", "own.py", "experiment.yaml"} <= {path.name for path in files}
    assert not [path for path in files if planted.encode() in path.read_bytes()]
    assert planted not in done.out + done.err


@pytest.mark.parametrize("launcher", [COMPLETING, QUEUE])
def test_other_data_under_the_same_id_are_a_new_run(launcher: str, file: Path, tmp_path: Path) -> None:
    """The id does not depend on ``data.root``, since the same data are elsewhere on another machine."""

    def submit(root: Path, *more: str) -> Done:
        data = f"data={{name: imagefolder, root: {root}, image_size: 8}}"
        here = ["--local"] if launcher == COMPLETING else []
        return hpc_train("submit", file, data, *here, "--launcher", launcher, *more)

    one, two = write_images(tmp_path / "one"), write_images(tmp_path / "two", classes=3)
    assert submit(one).code == 0
    (paths,) = find_runs([])
    write_status(paths, RunStatus("completed", 9, 9))
    copy = shutil.copytree(one, tmp_path / "copy")
    assert "completed already" in submit(copy).err
    other = submit(two)
    assert other.code == 1
    assert f"completed, in {paths.folder}, but of other files than data.root ({two}) has now" in other.err
    assert submit(two, "--new").code == 0
    beside = RunPaths(paths.folder.with_name(f"{paths.folder.name}-2"))
    write_status(beside, RunStatus("completed", 9, 9))
    again = submit(two)
    assert again.code == 0 and f"completed already, in {beside.folder}" in again.err
    assert find_runs([]) == [paths, beside]
