"""The scripts of ``examples/programs``: what a session adds to them, and that they run without hpc-train."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.experiment.config.schema import Program
from hpc_train.experiment.validate.loading import load
from hpc_train.experiment.workload import workload_of
from tests.end_to_end.runs import ONE_THREAD, REPOSITORY
from tests.waiting import HANG_LIMIT_S
from tests.workloads.examples import MODES, NAMES, PROGRAMS, copied, same_weights, weights

_MAX_LINES = 5


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


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_both_scripts_run_without_a_launcher_to_the_same_weights(name: str, tmp_path: Path) -> None:
    ends = []
    for script in ("train.py", "train_session.py"):
        code = copied(name, tmp_path / script)
        command = [sys.executable, script]
        environment = ONE_THREAD | {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}
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
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for start, end in ((0, 20), (20, 25)):
        command = [*launch, "train_session.py", f"--steps={end}"]
        done = subprocess.run(
            command, cwd=code, env=os.environ | ONE_THREAD, capture_output=True, text=True, check=False,
            timeout=HANG_LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        shown = [line.partition(":")[0] for line in done.stdout.splitlines()]
        assert shown == [f"step {step}" for step in range(start + 1, end + 1)]
