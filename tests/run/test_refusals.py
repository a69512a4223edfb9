"""Errors caused by the environment are one line that names it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpc_train.run.tracebacks import refusal
from tests.refused_calls import IS_POSSIBLE, prefix

needs_seccomp = pytest.mark.skipif(not IS_POSSIBLE, reason="calls are refused by number, on Linux on x86-64")
THREAD = """
import threading
from hpc_train.run.tracebacks import refusal
try:
    threading.Thread(target=print).start()
except RuntimeError as error:
    print(refusal(error))
"""
CPUS = """
import os
from hpc_train.run.resource_limits import usable_cpus
print(len(usable_cpus()) == os.cpu_count())
"""
SESSION = """
import sys
from hpc_train.run.processes import start_in_own_session
leads = "import os; print(os.getpgid(0) == os.getpid())"
start_in_own_session([sys.executable, "-c", leads]).wait()
"""
LIMITS = "from hpc_train.run.resource_limits import current; print(current())"


@needs_seccomp
@pytest.mark.parametrize(
    ("call", "error", "program", "printed"),
    [
        ("clone3", "EPERM", THREAD, "the sandbox (seccomp) refuses clone3"),
        ("clone3", "ENOSYS", THREAD, ""),
        ("sched_getaffinity", "EPERM", CPUS, "True"),
        ("setsid", "EPERM", SESSION, "True"),
        ("setsid", "ENOSYS", SESSION, "True"),
        ("prlimit64", "EPERM", LIMITS, "{}"),
    ],
)
def test_refused_calls_are_done_without_or_named(call: str, error: str, program: str, printed: str) -> None:
    done = subprocess.run(
        [*prefix([call], error), sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert printed in done.stdout
    assert not done.stderr


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("TORCH_LOGS", "x", ValueError("\nInvalid log settings: x, must be a comma separated list")),
        (
            "TORCH_DISTRIBUTED_DEBUG",
            "x",
            ValueError("The value of TORCH_DISTRIBUTED_DEBUG must be OFF or INFO."),
        ),
        ("TRITON_CACHE_DIR", "/no/x", FileNotFoundError(2, "No such file or directory", "/no/x/y")),
    ],
)
def test_refused_variables(monkeypatch: pytest.MonkeyPatch, name: str, value: str, error: Exception) -> None:
    assert refusal(error) is None
    monkeypatch.setenv(name, value)
    line = refusal(error)
    assert line is not None and line.startswith(f"{name}={value}: {type(error).__name__}: ")
    assert "\n" not in line
    assert refusal(KeyError(name)) is None, "an error of another kind"


def test_a_users_own_error_is_not_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_LOGS", "dynamo")
    assert refusal(ValueError("dynamo is not a model")) is None
    assert refusal(FileNotFoundError(2, "No such file or directory", os.devnull)) is None
