"""The scripts of ``examples/programs``: what a session adds to them, and that they run without hpc-train."""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_train.experiment.config.schema import Program
from hpc_train.experiment.validate.loading import load
from hpc_train.experiment.workload import workload_of
from hpc_train.paths import RunPaths
from hpc_train.run.metric_rows import iter_rows
from tests import warm
from tests.end_to_end.runs import ONE_THREAD, REPOSITORY, status
from tests.waiting import HANG_LIMIT_S
from tests.workloads.examples import MODES, NAMES, PROGRAMS, copied, same_weights, torchrun, weights
from tests.workloads.programs import HELD, forked, resumed_and_quiet

_MAX_LINES = 5
_GPT2 = "transformers.models.gpt2.modeling_gpt2"
_LIBRARIES = ("lightning.pytorch", "sklearn.datasets", "transformers.trainer", _GPT2)


def lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def num_changed(before: list[str], after: list[str]) -> int:
    """Return how many lines were added, removed or changed; a changed one counts once."""
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in blocks if kind != "equal")


def test_changed_lines_are_counted() -> None:
    assert num_changed(["a", "b", "c"], ["a", "B", "new", "c"]) == 2
    assert num_changed(["a", "b", "c"], ["a"]) == 2
    assert num_changed(["a", "b"], ["a", "b"]) == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_session_takes_at_most_five_lines(name: str) -> None:
    plain, session = (lines(PROGRAMS / name / f"{script}.py") for script in ("train", "train_session"))
    assert not any("hpc_train" in line for line in plain)
    assert 0 < num_changed(plain, session) <= _MAX_LINES
    assert any("hpc_train" in line for line in session)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_its_files_can_be_submitted(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROGRAMS / name)
    job = load(Path(f"{mode}.yaml")).experiment
    assert isinstance(job, Program) and workload_of(job).missing_code([job], lambda: None) == []
    script = "train.py" if mode == "plain" else "train_session.py"
    assert job.program.command == ["python", script] and job.program.outputs
    assert (job.program.resume is not None) == (mode == "plain")


def test_the_page_names_each() -> None:
    page = (REPOSITORY / "examples" / "README.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"](programs/{name}/train.py)" not in page] == []
    assert [name for name in NAMES if f"](programs/{name}/train_session.py)" not in page] == []


@pytest.fixture(scope="module")
def door() -> Iterator[str | None]:
    """The scripts' own server: each would take 8 s of CPU time to import Lightning, 5 s for transformers."""
    with warm.door_with(*_LIBRARIES) as door:
        yield door


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_both_scripts_run_without_a_launcher_to_the_same_weights(
    name: str, door: str | None, tmp_path: Path
) -> None:
    environment = os.environ | ONE_THREAD | {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}
    if door:
        environment[warm.DOOR] = door
    ends = []
    for script in ("train.py", "train_session.py"):
        code = copied(name, tmp_path / script)
        shutil.copy(HELD, code)
        command = warm.task(HELD.name, script)
        done = subprocess.run(
            command, cwd=code, env=environment, capture_output=True, text=True, check=False,
            timeout=HANG_LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        ends.append(weights(code))
    assert same_weights(*ends)


@pytest.mark.slow
def test_a_second_start_without_a_launcher_resumes_on_all_ranks(tmp_path: Path) -> None:
    code = copied("gan", tmp_path / "code")
    for first, last in ((0, 20), (20, 25)):
        process = torchrun(code, "train_session.py", f"--steps={last}")
        out, err = process.communicate(timeout=HANG_LIMIT_S)
        assert process.returncode == 0, err
        shown = [line.partition(":")[0] for line in out.splitlines()]
        assert shown == [f"step {step}" for step in range(first + 1, last + 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps", "stop"), [("lightning", 60, 30), ("huggingface", 40, 18)])
def test_an_example_on_two_ranks_resumes_bitwise(
    name: str, steps: int, stop: int, door: str | None, tmp_path: Path
) -> None:
    code = copied(name, tmp_path / "code")
    words = ["session.yaml", f"program.args.steps={steps}", "--devices", "2"]
    words += forked(code, "train_session.py", door)
    step, paths, quiet = resumed_and_quiet(stop, tmp_path, *words, code=code, pace="program.args.sleep=0.2")
    assert step < steps == status(paths)["total_steps"]
    assert f"saved step {step}" in paths.attempt(1).log(0).read_text()
    assert same_weights(weights(paths.work), weights(quiet.work))
    assert logged(paths) == logged(quiet)
    assert [step for step, split, _ in logged(paths) if split == "train"] == list(range(1, steps + 1))


def logged(paths: RunPaths) -> list[Any]:
    """Return the rows of a run without times, by split and step."""
    rows = [
        (row["step"], row["split"], {name: row[name] for name in ("loss", "accuracy") if name in row})
        for row in iter_rows(paths.metrics)
    ]
    return sorted(rows, key=lambda row: (row[1], row[0]))
