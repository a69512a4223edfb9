"""A file that was edited after its submit: the frozen copy runs, and ``resume`` says what differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.cli.changes import changes_on_resume
from hpc_train.experiment.validate.loading import load
from hpc_train.paths import RunPaths
from hpc_train.run.files import read_json
from hpc_train.run.find import find_runs
from hpc_train.run.run_status import RunStatus, write_status
from tests.cli.commands import Done, hpc_train
from tests.cli.launchers import FAILING, QUEUE, queued, requests
from tests.plan.files import loaded
from tests.run.runs import small_experiment

pytestmark = pytest.mark.fault(38)


def _submit(file: Path, *arguments: str) -> list[RunPaths]:
    hpc_train("submit", file, "--local", "--launcher", FAILING, *arguments)
    return find_runs([])


def _edit(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def _resume(*arguments: str) -> Done:
    return hpc_train("resume", "tiny", *arguments)


def test_a_file_as_it_was_is_not_spoken_of(file: Path) -> None:
    overrides = ["seed=3", "data.workers=2"]
    (run,) = _submit(file, *overrides)
    assert "exp.yaml" not in _resume().err
    assert (read_json(run.run) or {})["source"] == {"file": str(file), "overrides": overrides}


def test_the_frozen_copy_runs_and_the_difference_is_said(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    (run,) = _submit(Path(file.name))
    _edit(file, "lr: 0.1", "lr: 0.2")
    told = "optimization.optimizer.lr 0.1 → 0.2 (the run continues with 0.1)"
    assert f"{run.folder.name}: exp.yaml has changed since: {told}\n" in _resume().err
    assert requests[-1].experiment.optimization.optimizer.lr == 0.1


def test_what_a_resume_can_take_over_is_said_as_it_takes_it(file: Path) -> None:
    _submit(file)
    _edit(file, "device: cpu\n", "device: auto\ncheckpoint: {keep: 5}\nparallel: {strategy: fsdp}\n")
    done = _resume()
    fsdp = "parallel.strategy ddp → fsdp"
    for line in (
        "device cpu → auto (the run continues with cpu; add device=auto to take it over)",
        "checkpoint.keep 3 → 5 (the run continues with 3; add checkpoint.keep=5 to take it over)",
        f"{fsdp} (the run continues with ddp; add parallel.strategy=fsdp to take it over)",
    ):
        assert f"\n  {line}\n" in done.err
    done = _resume("device=auto", "checkpoint.keep=5")
    assert f"{file} has changed since: parallel.strategy ddp" in done.err
    assert "parallel.strategy" not in _resume("parallel.strategy=fsdp").err.split("from now on")[0]
    assert "has changed since" not in _resume().err, "all of it was taken over"


def test_what_an_earlier_resume_changed_is_no_change_of_the_file(file: Path) -> None:
    _submit(file)
    _resume("data.workers=2")
    assert "has changed" not in _resume().err
    _edit(file, "data: {name", "data: {workers: 4, name")
    assert "data.workers 0 → 4 (the run continues with 2; add data.workers=4" in _resume().err


def test_many_changes_are_counted(file: Path) -> None:
    _submit(file)
    _edit(
        file,
        "  optimizer: {name: sgd, lr: 0.1}",
        "  optimizer: {name: sgd, lr: 0.2, momentum: 0.9, weight_decay: 0.1}\n  clip_grad_norm: 1.0\n"
        "  label_smoothing: 0.1\n  schedule: {name: cosine, min_factor: 0.1}\nseed: 5\nprecision: bf16\n"
        "checkpoint: {keep: 9, every_min: 3}\nevaluation: {every_epochs: 2}\nlogging: {every_steps: 3}",
    )
    done = _resume()
    assert done.err.count(" → ") == 10
    assert "\n  and 3 more\n" in done.err


@pytest.mark.parametrize(("text", "why"), [(None, "no longer exists"), ("name: [", "has errors now")])
def test_a_file_that_can_not_be_compared_is_said_in_a_line(file: Path, text: str | None, why: str) -> None:
    _submit(file)
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    done = _resume()
    assert f"{file} {why}, so its changes are unknown" in done.err
    assert len(requests) == 2, "it goes on all the same"


def test_runs_of_a_sweep_are_compared_with_their_own_values(file: Path) -> None:
    """The sweep as it is now is none of theirs."""
    file.write_text(file.read_text() + "sweep: {grid: {seed: [1, 2], optimization.optimizer.lr: [0.3]}}\n")
    hpc_train("submit", file, "--launcher", QUEUE)
    for paths in find_runs([]):
        write_status(paths, RunStatus("cancelled"))
    _edit(file, "seed: [1, 2]", "seed: [1, 2, 3]")
    assert "has changed" not in _resume().err
    assert len(queued[-1]) == 2
    for paths in find_runs([]):
        write_status(paths, RunStatus("cancelled"))
    _edit(file, "epochs: 3", "epochs: 4")
    file.write_text(file.read_text() + "slurm: {nodes: 2}\n")
    done = _resume()
    assert f"2 runs: {file} has changed since:\n" in done.err
    assert "  optimization.epochs 3 → 4 (the run continues with 3)\n" in done.err
    takes_over = "(the run continues without it; add 'slurm={\"nodes\": 2}' to"
    assert f'  slurm absent → {{"nodes": 2}} {takes_over}' in done.err


def test_what_is_asked_of_slurm_is_nothing_to_a_local_run(file: Path) -> None:
    _submit(file)
    file.write_text(file.read_text() + "slurm: {nodes: 2}\n")
    assert "has changed" not in _resume().err


def test_nothing_of_a_changed_file_acts_on_the_terminal(file: Path) -> None:
    _submit(file)
    _edit(file, "model: {", 'model: {args: {text: "\\e]0;x\\a\\n\\u202e"}, ')
    told = _resume().err.split("has changed since")[1].split("going on")[0]
    assert "model.args {} → " in told and "\\u202e" in told
    assert not any(ord(char) < 32 and char != "\n" for char in told)


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ([], ["device=auto"], ["device=auto"]),
        (["data.root=a"], [], ["data.root=null"]),
        ([], ["data.root='12'"], ['data.root="12"']),
        ([], ["data.root='a: b'"], ['data.root="a: b"']),
        ([], ["logging.wandb={project: x}"], ['logging.wandb={"project": "x"}']),
        (["logging.wandb={project: x}"], ["logging.wandb={project: y}"], ["logging.wandb.project=y"]),
        ([], ["name=other", "slurm={nodes: 1}", "sweep.grid={seed: [1]}"], []),
    ],
)
def test_each_changed_key_is_named_once_and_leads_to_what_is_wanted(
    tmp_path: Path, before: list[str], after: list[str], changes: list[str]
) -> None:
    frozen, wanted = loaded(tmp_path, *before).experiment, loaded(tmp_path, *after).experiment
    assert [change.override for change in changes_on_resume(frozen, wanted)] == changes
    resumed = load(tmp_path / "exp.yaml", [*before, *changes]).experiment
    assert changes_on_resume(resumed, wanted) == []


def test_a_free_mapping_is_given_whole() -> None:
    """No KEY=VALUE takes a key out."""
    frozen = small_experiment(logging={"loggers": {"a": {}, "b": {}}})
    wanted = small_experiment(logging={"loggers": {"a": {}}})
    (change,) = changes_on_resume(frozen, wanted)
    assert change.override == 'logging.loggers={"a": {}}'
