"""A run whose files are damaged: every command ends with a known exit code, and shows the other runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cli import evaluate
from hpc_train.cli.logs import _LogReader
from hpc_train.errors import ExitCode
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import tell_end
from hpc_train.run.find import find_runs
from hpc_train.training.checkpoint.export import main as export
from tests.cli.commands import hpc_train
from tests.cli.launchers import COMPLETING, FAILING
from tests.run.test_checkpoints import write_checkpoint
from tests.waiting import HANG_LIMIT_S

_FILES = (
    "run.json", "status.json", "experiment.yaml", "resolved.json", "metrics.jsonl", "micro_batch.json",
    "cancelled.json", ".claim.lock", "attempts/1/attempt.json", "attempts/1/events.json",
    "attempts/1/rank-0.log", "attempts/1/rank-0.error", "attempts/1/rank-0.exit",
    "attempts/1/heartbeat-x.json",
    "checkpoints/step-00000004/manifest.json", "checkpoints/step-00000004/state.json",
)  # fmt: skip
_FOLDERS = ("code", "attempts", "attempts/1", "checkpoints", "checkpoints/step-00000004", "cache", "wandb")
_JSON = ("run.json", "status.json", "attempts/1/attempt.json", "checkpoints/step-00000004/manifest.json")
_VALUES: tuple[Any, ...] = ("²", [{}], {"x": [[1]]})
#: Else each kind of damage is done to every other name, and commands that change the run get one of the
#: values per key: one decoder reads the files for all.
_TRIES_ALL = os.environ.get("HPC_TRAIN_ALL_PARALLEL") == "1"

Damage = Callable[[Path], object]


class _Hangs(BaseException):
    """A command has not ended within HANG_LIMIT_S; ends the test, since the other commands may hang too."""


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


#: Content that is none of ours.
_CONTENTS: dict[str, Damage] = {
    "empty": lambda path: path.touch(),
    "binary": lambda path: path.write_bytes(b"\xff\x00\xfe" * 9),
    "nested": lambda path: path.write_text("[" * 100_000),
}
#: What is there instead, and for which names.
_KINDS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "pipe": (os.mkfifo, _FILES),
    "folder": (lambda path: path.mkdir(), _FILES),
    "link to itself": (loop, (*_FILES, *_FOLDERS)),
    "nothing": (lambda path: None, _FOLDERS),
}
_READERS = {"status", "compare", "verify", "resume"}


@pytest.fixture
def runs(file: Path, tmp_path: Path) -> tuple[RunPaths, RunPaths]:
    """A run that is going to be damaged, and a healthy one of another experiment."""
    text = file.read_text()
    for name in ("damaged", "healthy"):
        file.write_text(text.replace(text.splitlines()[0], f"name: {name}"))
        hpc_train("submit", file, "--local", "--launcher", FAILING)
    file.write_text(text.replace(text.splitlines()[0], "name: damaged"))
    damaged, healthy = sorted(find_runs([]), key=lambda paths: paths.siblings.folder.name)
    write_checkpoint(damaged, 4, attempt=1)
    (damaged.attempt(1).log(0)).write_text("a line\n")
    tell_end(damaged.attempt(1), 0, "ValueError: it broke")
    return damaged, healthy


@pytest.fixture(autouse=True)
def _export_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a process of its own, which imports torch each time."""
    monkeypatch.setattr(evaluate, "run_child", lambda module, *arguments: export(arguments))


@pytest.fixture(autouse=True)
def _text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed goes into a string, which takes no bytes."""
    monkeypatch.setattr(_LogReader, "_print", lambda reader, chunk: print(chunk))


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise _Hangs

    before = signal.signal(signal.SIGALRM, stop)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def commands(damaged: RunPaths, file: Path) -> list[list[str | Path]]:
    folder = damaged.folder
    return [
        ["status"],
        ["status", "--json"],
        ["status", folder],
        ["logs", folder],
        ["verify", "damaged"],
        ["compare", folder, "healthy"],
        ["export", folder, "-o", file.with_name("out.safetensors")],
        ["cancel", folder],
        ["clean", folder, "--yes"],
        ["submit", file, "--local", "--launcher", COMPLETING],
        ["resume", folder, "--launcher", COMPLETING],
        ["rm", folder, "--yes"],
    ]


def problem(command: list[str | Path], healthy: RunPaths) -> str | None:
    """Return what is wrong with how a command ends."""
    signal.setitimer(signal.ITIMER_REAL, HANG_LIMIT_S)  # a command that waits for a pipe is ended
    try:
        done = hpc_train(*command)
    except (Exception, pytest.fail.Exception) as error:
        return f"{' '.join(map(str, command[:2]))}: {error!r:.200}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if done.code not in set(ExitCode) or "Traceback" in done.err:
        return f"{command[0]}: {done}"
    if command in (["status"], ["status", "--json"]) and healthy.folder.name not in done.out:
        return f"{command[0]}: does not show the healthy run: {done}"
    return None


def problems(
    runs: tuple[RunPaths, RunPaths], file: Path, name: str, damage: Damage, only: set[str] | None = None
) -> list[str]:
    """Damage one file of the run, try every command, and put the run back after those that change it."""
    damaged, healthy = runs
    kept = damaged.siblings.folder.parent.parent / "kept"
    if not kept.exists():
        shutil.copytree(damaged.siblings.folder, kept, symlinks=True)
    found = []
    is_spoilt = True
    for command in commands(damaged, file):
        if only is not None and command[0] not in only:
            continue
        if (name, command[0]) == ("metrics.jsonl", "resume"):
            continue  # the launcher of this test appends to it
        if is_spoilt:
            shutil.rmtree(damaged.siblings.folder, ignore_errors=True)
            shutil.copytree(kept, damaged.siblings.folder, symlinks=True)
            path = damaged.folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            if path.parent.is_dir():
                damage(path)
        is_spoilt = command[0] in {"cancel", "clean", "submit", "resume", "rm"}
        if why := problem(command, healthy):
            found.append(f"{name} {why}")
    return found


def test_a_link_to_itself_is_unreadable(runs: tuple[RunPaths, RunPaths], file: Path) -> None:
    assert problems(runs, file, "attempts/1/attempt.json", loop) == []


def _some(names: tuple[str, ...], number: int) -> tuple[str, ...]:
    return names if _TRIES_ALL else names[number % 2 :: 2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", _KINDS)
def test_damaged_files(runs: tuple[RunPaths, RunPaths], file: Path, kind: str) -> None:
    damage, names = _KINDS[kind]
    names = _some(names, list(_KINDS).index(kind))
    assert [each for name in names for each in problems(runs, file, name, damage)] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", _CONTENTS)
def test_damaged_contents(runs: tuple[RunPaths, RunPaths], file: Path, kind: str) -> None:
    damage, names = _CONTENTS[kind], _some(_FILES, list(_CONTENTS).index(kind))
    assert [each for name in names for each in problems(runs, file, name, damage, _READERS)] == []


@pytest.mark.slow
def test_files_that_are_too_large(runs: tuple[RunPaths, RunPaths], file: Path) -> None:
    names = ("run.json", "status.json", "experiment.yaml", "resolved.json", "attempts/1/attempt.json")
    assert [each for name in names for each in problems(runs, file, name, sparse, {"status"})] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", _JSON)
def test_values_of_a_wrong_type(runs: tuple[RunPaths, RunPaths], file: Path, name: str) -> None:
    true = json.loads((runs[0].folder / name).read_text())
    wrong = []
    for (number, key), (kind, value) in product(enumerate(true), enumerate(_VALUES)):
        text = json.dumps(true | {key: value})
        is_tried_by_all = _TRIES_ALL or kind == number % len(_VALUES)
        tried = {"status", "resume", "clean", "cancel"} if is_tried_by_all else {"status"}
        found = problems(runs, file, name, lambda path: path.write_text(text), tried)
        wrong += [f"{key}={value}: {each}" for each in found]
    assert wrong == []


@pytest.mark.parametrize("name", ["²", "0", "1.bad", "9" * 30])
def test_a_folder_that_is_not_an_attempt(runs: tuple[RunPaths, RunPaths], file: Path, name: str) -> None:
    assert problems(runs, file, f"attempts/{name}", lambda path: path.mkdir(), {"status", "logs"}) == []
