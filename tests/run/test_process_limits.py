"""Limits of the operating system are named with their value, and only where they are the cause."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from hpc_train.run import process_limits
from hpc_train.run.process_limits import reached_limits

UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


@pytest.fixture
def all_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ulimit is 2**30, for a user other than root, and no cgroup limits anything."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**30, 2**30))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(process_limits, "_CGROUPS", Path("/nowhere"))


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
        (RuntimeError("Resource temporarily unavailable"), ["-u"]),
        (RuntimeError("can't start new thread"), ["-u"]),
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
    monkeypatch.setattr(process_limits, "_CGROUPS", Path("/nowhere"))
    assert reached_limits(MemoryError()) == reached_limits(RuntimeError("can't start new thread")) == ""


def test_the_limit_of_processes_does_not_apply_to_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 100))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert process_limits.resource_limit_words(resource.RLIMIT_NPROC) == ""


@pytest.mark.usefixtures("all_limited")
def test_a_fork_that_is_refused_names_the_limit_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")  # as os.fork

    with pytest.raises(BlockingIOError) as raised:
        refuse()
    assert "`ulimit -u`" in reached_limits(raised.value)


def test_the_lowest_limit_of_the_cgroups_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both versions of cgroups; ``max`` is no limit."""
    monkeypatch.setattr(process_limits, "_CGROUPS", tmp_path)
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
