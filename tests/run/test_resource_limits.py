"""Which of the operating system's limits a message reports, and its value."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from hpc_train.run import resource_limits
from hpc_train.run.resource_limits import clause, explained, reached_limits, reporting_line

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
    values |= {resource.RLIMIT_FSIZE: 4096}
    infinity = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (values.get(kind, infinity), infinity))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert resource_limits.current() == {
        "-v": "the address space is limited to 1024 MiB (`ulimit -v`)",
        "-u": "the number of the user's processes and threads is limited to 100 (`ulimit -u`)",
        "-f": "the size of a file is limited to 4096 bytes (`ulimit -f`)",
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


UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


@pytest.fixture
def all_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ulimit is 2**30, for a user other than root, and no cgroup limits anything."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**30, 2**30))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(resource_limits, "_CGROUPS", Path("/nowhere"))


@pytest.mark.usefixtures("all_limited")
@pytest.mark.parametrize(
    ("error", "options"),
    [
        (MemoryError(), ["-v", "-d"]),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), ["-v", "-d"]),
        (RuntimeError("std::bad_alloc"), ["-v", "-d"]),
        (OSError(errno.EFBIG, "File too large"), ["-f"]),
        (OSError(errno.EMFILE, "Too many open files"), ["-n"]),
        (RuntimeError("received 0 items of ancdata"), ["-n"]),
        (RuntimeError("Resource temporarily unavailable"), ["-u", "-v"]),
        (RuntimeError("can't start new thread"), ["-u", "-v"]),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), ["-v"]),
        (OSError(errno.ENOENT, "No such file or directory"), []),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), []),
        (ValueError("can't start new thread"), []),
    ],
)
def test_the_limit_of_an_error(error: Exception, options: list[str]) -> None:
    words = reached_limits(error)
    assert [part.split("`")[0] for part in words.split("(`ulimit ")[1:]] == options
    wrapped = ValueError("wrapped")
    wrapped.__cause__ = error
    assert reached_limits(wrapped) == words


def test_no_limit_is_named_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: UNLIMITED)
    monkeypatch.setattr(resource_limits, "_CGROUPS", Path("/nowhere"))
    assert reached_limits(MemoryError()) == reached_limits(RuntimeError("can't start new thread")) == ""


def test_the_limit_of_processes_does_not_apply_to_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 100))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "-u" not in resource_limits.current()


@pytest.mark.usefixtures("all_limited")
def test_a_fork_that_is_refused_names_the_limit_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")  # as os.fork

    with pytest.raises(BlockingIOError) as raised:
        refuse()
    assert "`ulimit -u`" in reached_limits(raised.value)


def test_a_controller_is_in_its_own_cgroup_of_version_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cgroup").write_text("3:pids:/a/b\n2:cpu:/c\n")
    monkeypatch.setattr(resource_limits, "_CGROUPS", tmp_path)
    monkeypatch.setattr(resource_limits, "Path", lambda _: tmp_path / "cgroup")
    folders = set(resource_limits.cgroup_folders("pids"))
    assert folders == {tmp_path / "pids" / inner for inner in ("a/b", "a", "")}


def test_the_lowest_limit_of_the_cgroups_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both versions of cgroups; ``max`` means unlimited."""
    monkeypatch.setattr(resource_limits, "_CGROUPS", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: UNLIMITED)
    for root in (tmp_path, tmp_path / "pids"):
        root.mkdir(exist_ok=True)
        (root / "pids.max").write_text("max\n")
    assert reached_limits(RuntimeError("can't start new thread")) == ""
    for root in (tmp_path, tmp_path / "pids"):
        (root / "pids.max").write_text("300\n")
    words = reached_limits(RuntimeError("can't start new thread"))
    assert words.startswith("; processes and threads of the cgroup are limited to 300 (")
    assert "pids.max): request more" in words
    assert reached_limits(MemoryError()) == "", "the kernel kills a process instead"
