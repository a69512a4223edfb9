"""Which of the operating system's limits a message reports, and its value."""

from __future__ import annotations

import resource

import pytest

from hpc_train.run import resource_limits
from hpc_train.run.resource_limits import clause, explained, reporting_line

LIMITS = {option: f"{option} is limited" for option in ("-v", "-d", "-f", "-u", "-n", "-t")}


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("MemoryError", "-v -d"),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8 GiB for an array", "-v -d"),
        ("OSError: [Errno 12] Cannot allocate memory", "-v -d"),
        ("  what():  std::bad_alloc", "-v -d"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes", "-v -d"),
        ("ImportError: libtorch_cuda.so: failed to map segment from shared object", "-v"),
        ("RuntimeError: can't start new thread", "-u -v"),
        ("libgomp: Thread creation failed: Resource temporarily unavailable", "-u -v"),
        ("OpenBLAS blas_thread_init: pthread_create failed for thread 1 of 2", "-u -v"),
        ("bash: fork: retry: Resource temporarily unavailable", "-u"),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "-u"),
        ("OSError: [Errno 24] Too many open files: 'x'", "-n"),
        ("OSError: [Errno 27] File too large", "-f"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", ""),
        ("RuntimeError: CUDA error: cannot allocate memory", ""),
        ("recv: Resource temporarily unavailable", ""),
        ("ValueError: too hot", ""),
    ],
)
def test_a_message_names_the_limits_that_may_be_its_cause(message: str, options: str) -> None:
    found = clause(message, LIMITS)
    assert found.partition(": raise it")[0] == ("" if not options else f"; {' and '.join(_names(options))}")
    assert clause(message, {}) == "", "none is set"


def _names(options: str) -> list[str]:
    return [LIMITS[option] for option in options.split()]


@pytest.mark.parametrize(("signal", "option"), [("SIGXFSZ", "-f"), ("SIGXCPU", "-t")])
def test_a_signal_names_its_limit(signal: str, option: str) -> None:
    import signal as signals

    assert clause("", LIMITS, signals.Signals[signal]).startswith(f"; {option} is limited: ")


def test_limits_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {resource.RLIMIT_AS: 1 << 30, resource.RLIMIT_NPROC: 100, resource.RLIMIT_CPU: 60}
    infinity = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (values.get(kind, infinity), infinity))
    assert resource_limits.current() == {
        "-v": "the address space is limited to 1024 MiB (`ulimit -v`)",
        "-u": "the number of the user's processes and threads is limited to 100 (`ulimit -u`)",
        "-t": "CPU time is limited to 60 s (`ulimit -t`)",
    }


def test_the_line_of_a_traceback_that_reports_the_limit_is_explained() -> None:
    text = (
        'Traceback (most recent call last):\n  File "x", line 1\n    raise MemoryError\nMemoryError\nnote\n'
    )
    lines = explained(text, LIMITS).splitlines()
    assert lines[3].startswith("MemoryError; -v is limited and -d is limited: raise it with `ulimit`")
    assert [*lines[:3], *lines[4:]] == [*text.splitlines()[:3], "note"]
    assert explained("ValueError: x\n", LIMITS) == "ValueError: x\n"


def test_the_line_of_a_log_that_reports_a_limit_is_found() -> None:
    log = "terminate called after throwing\n  what():  std::bad_alloc\n/bin/sh: done\n"
    assert reporting_line(log) == "what():  std::bad_alloc"
    assert reporting_line("all is well\n") is None
