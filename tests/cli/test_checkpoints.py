from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.cli import evaluate
from hpc_train.errors import ExitCode
from hpc_train.paths import RunPaths
from hpc_train.run import evaluation_jobs
from hpc_train.run.files import write_json
from tests.cli.commands import hpc_train, stderr_of
from tests.run.runs import small_run
from tests.run.test_checkpoints import begin_attempt


def _lines(*arguments: str) -> tuple[int, list[str]]:
    done = hpc_train("verify", *arguments)
    return done.code, [line.partition("step-000000")[2] for line in done.out.splitlines()]


def test_whole_checkpoints_and_the_one_that_would_load_are_named(saved: RunPaths) -> None:
    assert _lines("abc") == (0, ["10  whole, would load", "05  whole"])


def test_a_damaged_checkpoint_fails_and_the_next_would_load(saved: RunPaths) -> None:
    shard = saved.checkpoint(10).shard(1)
    content = shard.read_bytes()
    shard.write_bytes(content[:3] + b"?" + content[4:])
    done = hpc_train("verify", "abc")
    assert str(shard) in done.err
    assert _lines("abc") == (1, ["10  damaged", "05  whole, would load"])
    shard.write_bytes(content)
    saved.checkpoint(10).manifest.unlink()
    assert _lines("abc") == (1, ["10  damaged", "05  whole, would load"])


def test_a_checkpoint_of_an_attempt_that_lost_the_run_does_not_count(saved: RunPaths) -> None:
    begin_attempt(saved, 2, ["step-00000005"])
    code, (ten, five) = _lines("abc")
    assert code == 0
    assert "does not count" in ten
    assert five == "05  whole, would load"


def test_a_run_without_checkpoints_says_so(tmp_path: Path) -> None:
    small_run(tmp_path / "runs")
    done = hpc_train("verify", "abc")
    assert (done.code, done.out) == (0, "")
    assert "no checkpoint yet" in done.err


@pytest.mark.slow
def test_export_passes_the_exit_code_of_its_child_on(tmp_path: Path) -> None:
    small_run(tmp_path / "runs")
    assert hpc_train("export", "abc", "-o", tmp_path / "out.safetensors").code == 2


@pytest.mark.parametrize("options", ["--best --step 3", "--last --best", "--last --step 3"])
def test_options_that_select_different_checkpoints_are_refused(saved: RunPaths, options: str) -> None:
    for command in (("export", "abc", "-o", "w.safetensors"), ("evaluate", "abc")):
        assert "exclude each other; use one of them" in stderr_of(2, *command, *options.split())


def test_export_to_an_unknown_suffix_is_reported(saved: RunPaths) -> None:
    done = hpc_train("export", "abc", "-o", "w.xyz", "--best")
    assert "-o w.xyz: written as safetensors" in done.err


@pytest.mark.parametrize(
    ("options", "is_due", "is_recorded"),
    [
        ([], True, True),
        ([], False, False),
        (["data.workers=1"], True, False),
        (["--code", "new"], True, False),
    ],
)
def test_an_evaluation_adds_the_row_that_a_job_should_have_left(
    saved: RunPaths, monkeypatch: pytest.MonkeyPatch, options: list[str], is_due: bool, is_recorded: bool
) -> None:
    def run_ranks(*_: object) -> tuple[ExitCode, RunPaths]:
        paths = RunPaths(saved.folder.parents[2] / "temporary" / "ranks")
        paths.folder.mkdir(parents=True)
        write_json(paths.evaluated_checkpoint, {"run": str(saved.folder)})
        paths.metrics.write_text('{"split": "val", "step": 5, "loss": 0.5}\n')
        return ExitCode.DONE, paths

    monkeypatch.setattr(evaluate, "run_ranks", run_ranks)
    if is_due:
        evaluation_jobs.request(saved, 5)
        evaluation_jobs.note_failure(saved, 5, "job 3 ended without a result: CANCELLED")
    assert hpc_train("evaluate", "abc", "--step", "5", *options).code == 0
    assert list(evaluation_jobs.rows(saved)) == [5] * is_recorded
    assert list(evaluation_jobs.failures(saved)) == [5] * (is_due and not is_recorded)
