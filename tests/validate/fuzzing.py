"""Reads hostile files under limits of memory and time: what ``test_fuzzing`` starts as a process of its own.

    python -m tests.validate.fuzzing FOLDER EXAMPLES

Exits 0, or with Python's traceback and hypothesis's smallest example of what went wrong.
"""

from __future__ import annotations

import io
import os
import re
import resource
import signal
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from hpc_train.cli import command_line
from hpc_train.cli.command_options import ValidateOptions
from hpc_train.cli.validate import validate
from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.plan.sweep import content_hash
from hpc_train.experiment.validate import model_facts
from hpc_train.experiment.validate.loading import load
from hpc_train.paths import RunPaths
from hpc_train.run import frozen_experiment
from tests.validate import hostile

MEMORY_BYTES = 2**30
#: Of one file, in CPU seconds; the largest files that are read take one.
FILE_LIMIT_S = 20.0
#: Events of Python's audit that reading a file has no reason for.
_FORBIDDEN = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn",
    "subprocess.Popen", "socket.", "ctypes.", "pickle.find_class", "os.remove", "os.rename", "os.mkdir",
    "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "shutil.", "tempfile.",
    "os.putenv", "code.__new__",
)  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Watch:
    """What the code under test does that it must not, by Python's own audit."""

    def __init__(self) -> None:
        self.found: list[str] = []
        #: Off while modules are imported that are imported late.
        self.is_armed = True
        self._is_on = False
        sys.addaudithook(self._note)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.found.clear()
        self._is_on = self.is_armed
        try:
            yield
        finally:
            self._is_on = False
        assert not self.found, self.found[:3]
        assert "canary" not in sys.modules

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_on and _is_forbidden(event, arguments):
            self.found.append(f"{event} {arguments!r:.200}")


def _is_forbidden(event: str, arguments: tuple[Any, ...]) -> bool:
    if event.startswith(_FORBIDDEN):
        return True
    if event == "open":
        return bool((arguments[2] or 0) & _WRITING)
    if event == "import":
        return str(arguments[0]).startswith("canary")
    if event == "exec":  # but for a module that is imported
        code = arguments[0]
        return not (
            isinstance(code, CodeType) and code.co_name == "<module>" and Path(code.co_filename).is_file()
        )
    if event == "compile":
        return not (isinstance(arguments[1], str) and Path(arguments[1]).is_file())
    return False


@contextmanager
def limited_time() -> Iterator[None]:
    def give_up(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took over {FILE_LIMIT_S} s of CPU")

    signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, FILE_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


class Reader:
    """Reads one hostile file after the other."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "exp.yaml"
        self._frozen = RunPaths(folder)
        self.watch = Watch()

    def check(self, content: bytes, overrides: list[str]) -> bool:
        """Fail unless the file is taken, or refused in lines that say where; tell which."""
        experiment = self.read(content, overrides)
        with limited_time(), self.watch.watching():
            self._check_printed(overrides)
        if experiment is not None:
            frozen_experiment.write(self._frozen, experiment)
            assert content_hash(frozen_experiment.read(self._frozen)) == content_hash(experiment)
        return experiment is not None

    def read(self, content: bytes, overrides: list[str]) -> Experiment | None:
        """Return the experiment, None where it is refused."""
        self.file.write_bytes(content)
        with limited_time(), self.watch.watching():
            try:
                return load(self.file, overrides).experiment
            except BadFileError as error:
                _check_lines(error.problems, str(self.file))
        return None

    def _check_printed(self, overrides: list[str]) -> None:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = command_line.exit_code_of(
                lambda: validate(ValidateOptions(file=self.file, overrides=list(overrides)))
            )
        assert code in {0, 65}, err.getvalue()
        assert _is_printable(out.getvalue() + err.getvalue())


def _check_lines(lines: list[str], file: str) -> None:
    assert lines
    for line in lines:
        assert re.fullmatch(rf"({re.escape(file)}:[1-9]\d*:[1-9]\d*|command line): .+; .+", line), line
        assert _is_printable(line) and "\n" not in line, line
        assert len(line) < 2000, line


def _is_printable(text: str) -> bool:
    return all(char == "\n" or unicodedata.category(char)[0] != "C" for char in text)


def limit_resources(num_examples: int) -> None:
    """Let this process take a gibibyte more than it has, and some time: more, and it ends."""
    cpu_s = 120 + num_examples
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def known(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Answer in place of the child process that imports timm."""
    if arguments:
        return {"has_batchnorm": True}
    some = {"timm": ["resnet50", "vit_tiny"], "torchvision": ["resnet18"], "datasets": ["CIFAR10", "MNIST"]}
    return some | {"timm_optimizers": ["lamb"]}


def main(folder: Path, num_examples: int) -> None:
    model_facts._answer = known  # type: ignore[assignment]
    reader = Reader(folder)
    valid = hostile.file_text(tuple(hostile.FULL.items())).encode()
    reader.watch.is_armed = False
    for content in (b"", b"sed: 1\n", valid):
        was_taken = reader.check(content, [])
    assert was_taken, "a file to change must be one without problems"
    reader.watch.is_armed = True
    limit_resources(num_examples)
    for content in hostile.huge().values():
        reader.read(content, [])
    for strategy in (hostile.noise, hostile.structures, hostile.mutations()):
        run_examples(strategy.map(lambda content: (content, [])), reader.check, num_examples // 4)
    run_examples(hostile.overrides.map(lambda given: (valid, given)), reader.check, num_examples // 4)


def run_examples(
    examples: SearchStrategy[tuple[bytes, list[str]]], check: Callable[[bytes, list[str]], bool], count: int
) -> None:
    @settings(
        max_examples=max(count, 1),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(examples)
    def holds(example: tuple[bytes, list[str]]) -> None:
        check(*example)

    holds()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
