"""What a rank leaves of an error, and which exit code it chooses."""

from __future__ import annotations

import errno
import resource
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hpc_train.errors import BadFileError, BadNodeError, ExitCode, TransientStorageError
from hpc_train.paths import RunPaths
from hpc_train.rank.env import RankFacts
from hpc_train.rank.signals import StopFlag
from hpc_train.run import resource_limits
from hpc_train.run.found_micro_batch import Found, keep
from hpc_train.training import rank_exit
from hpc_train.training.rank_exit import TrialError, report
from tests.run.runs import small_run

FULL = RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory")
OF_GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = small_run(tmp_path)
    found.attempt(1).folder.mkdir(parents=True)
    return found


def end(
    paths: RunPaths, error: BaseException, *, has_stepped: bool = False, signals: int = 0
) -> tuple[ExitCode, str | None]:
    """Return the exit code of rank 0, and what it leaves as its error."""
    flag = StopFlag(count=signals, may_exit_early=not has_stepped)
    try:
        raise error
    except BaseException as caught:
        code = report(caught, paths, 1, RankFacts(), flag)
    left = paths.attempt(1).error(0)
    return code, left.read_text() if left.exists() else None


def test_memory_that_is_full_before_the_first_step_must_be_fixed_in_the_file(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = end(paths, FULL)
    assert code == ExitCode.BAD_FILE
    assert text is not None and text.startswith(
        "optimization.micro_batch_size: 4 does not fit this node's memory; write a smaller one, "
        "activation_checkpointing: blocks, or a parallel.strategy that shards ("
    )
    assert "Traceback" not in text and "Traceback" in capsys.readouterr().err, "the log says where"


def test_an_unwritable_log_changes_no_exit_code(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk has no room for the log either."""
    error = OSError(errno.ENOSPC, "No space left on device", "shard")
    with open("/dev/full", "w", buffering=1) as full, monkeypatch.context() as patch:  # noqa: PTH123
        patch.setattr(sys, "stderr", full)
        code, text = end(paths, error)
        with pytest.raises(OSError, match="No space"):
            full.close()
    assert code == ExitCode.IO
    assert text is not None and "the disk is full" in text


def test_memory_that_is_full_later_is_a_crash_with_the_same_words(paths: RunPaths) -> None:
    code, text = end(paths, FULL, has_stepped=True)
    assert code == ExitCode.FAILED
    assert text is not None and text.startswith("optimization.micro_batch_size: 4 does not fit")


def test_what_fitted_in_an_earlier_attempt_is_not_the_files_mistake(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_exit, "committed", lambda paths: [paths.checkpoint(5)])
    assert end(paths, FULL)[0] == ExitCode.FAILED


def test_a_gpu_is_named_with_what_auto_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    optimization = {"steps": 10, "global_batch_size": 8, "micro_batch_size": "auto"}
    auto = small_run(tmp_path, optimization=optimization | {"optimizer": {"name": "sgd", "lr": 0.1}})
    auto.attempt(1).folder.mkdir(parents=True)
    keep(auto, Found(size=2, too_large=4, ranks=1, attempt=1))
    wrapped = RuntimeError("forward failed")
    wrapped.__cause__ = OF_GPU
    for error in (OF_GPU, wrapped):
        code, text = end(auto, error)
        assert code == ExitCode.BAD_FILE and text is not None
        assert text.startswith(
            "optimization.micro_batch_size: 2 does not fit cuda:3; write a smaller number, "
        )
    # Before torch's allocator has anything: who else holds it, another node may tell.
    assert end(auto, RuntimeError("CUDA error: out of memory"))[0] == ExitCode.FAILED
    _, text = end(auto, FULL)
    assert text is not None and text.startswith("Traceback"), "the host's memory, not the device's"


def test_memory_that_a_file_or_an_error_of_ours_tells_of_stays_what_it_was(paths: RunPaths) -> None:
    for error in (OSError(12, "Cannot allocate memory"), TransientStorageError("no memory")):
        error.__cause__ = OSError(12, "Cannot allocate memory")
        code, text = end(paths, error)
        assert code == ExitCode.FAILED
        assert text is not None and "Traceback" in text
    wrong = BadFileError("model.name: is wrong")
    wrong.__cause__ = FULL
    assert end(paths, wrong) == (ExitCode.BAD_FILE, "model.name: is wrong\n")


def test_nccls_words_on_a_peer_that_may_not_be_gone_are_kept(paths: RunPaths) -> None:
    remote = dist.DistBackendError("NCCL error: ncclRemoteError: remote process exited")
    assert end(paths, remote) == (ExitCode.PEER_LOST, None)
    own = dist.DistBackendError("NCCL error: ncclSystemError\nLast error:\nno /dev/shm")
    assert end(paths, own) == (
        ExitCode.PEER_LOST,
        "a peer is gone, or NCCL fails on this node: NCCL error: ncclSystemError Last error: no /dev/shm\n",
    )


def test_a_trials_error_is_told_as_the_ranks_own(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """Within a second traceback, of the rank that waited, the user's frames would be cut off the screen."""
    said = 'Traceback (most recent call last):\n  File "net.py", line 3, in net\nKeyError: 3'
    assert end(paths, TrialError(said)) == (ExitCode.FAILED, f"{said}\n")
    assert said in capsys.readouterr().err, "the log has the whole of it"


ADDRESS_SPACE = "the address space is limited to 4096 MiB (`ulimit -v`)"


@pytest.mark.parametrize(
    ("error", "limit", "words"),
    [
        (MemoryError("x"), resource.RLIMIT_AS, ADDRESS_SPACE),
        (RuntimeError("unable to allocate memory"), resource.RLIMIT_AS, ADDRESS_SPACE),
        (RuntimeError("can't start new thread"), resource.RLIMIT_AS, ADDRESS_SPACE),
        (OSError(errno.EFBIG, "x"), resource.RLIMIT_FSIZE, "a file is limited to 4096 MiB (`ulimit -f`)"),
        (
            OSError(errno.EMFILE, "Too many open files"),
            resource.RLIMIT_NOFILE,
            "the number of open files is limited to 4294967296 (`ulimit -n`)",
        ),
    ],
)
def test_a_limit_of_the_shell_is_named(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, error: Exception, limit: int, words: str
) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (4 << 30, 4 << 30) if kind == limit else unlimited
    )
    _, text = end(paths, error)
    assert text is not None and words in text


def test_a_disk_error_without_a_path_blames_no_folder(paths: RunPaths) -> None:
    """As of a semaphore in a read-only /dev/shm."""
    code, text = end(paths, OSError(errno.EROFS, "Read-only file system"))
    assert code == ExitCode.IO and text is not None
    assert text.startswith("input/output: Read-only file system (test_rank_exit.py:")
    assert "run's folder" not in text and "free some space" not in text


def test_a_permission_that_is_denied_names_who_owns_what_exists(paths: RunPaths) -> None:
    missing = paths.folder / "no" / "file"
    code, text = end(paths, PermissionError(errno.EACCES, "Permission denied", str(missing)))
    assert code == ExitCode.FAILED and text is not None and "Traceback" in text
    assert f"Permission denied: '{missing}'; its folder {paths.folder} belongs to " in text


def test_processes_that_do_not_start_name_a_limit(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource_limits.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (200, 200))
    code, text = end(paths, RuntimeError("can't start new thread"))
    assert code == ExitCode.FAILED, "the user's other processes may end"
    assert text is not None and "Traceback" not in text
    limit = "the number of the user's processes and threads is limited to 200 (`ulimit -u`)"
    assert f"can't start new thread; {limit}" in text


def test_a_node_that_fails_its_check_is_named_without_a_traceback(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "node n1 failed its check of shared memory: /dev/shm can't be used"
    assert end(paths, BadNodeError(words)) == (ExitCode.BAD_NODE, f"{words}\n")
    assert capsys.readouterr().err == f"{words}\n"


def test_a_limit_reached_before_the_first_step_refuses_the_run_without_a_traceback(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    error = OSError(errno.EMFILE, "Too many open files")
    code, text = end(paths, error)
    assert code == ExitCode.ENVIRONMENT and text is not None
    assert "Traceback" not in text + capsys.readouterr().err
    assert "Too many open files; the number" in text and "raised at test_rank_exit.py:" in text
    assert text.count("the number of open files is limited to 64 (`ulimit -n`)") == 1
    code, text = end(paths, error, has_stepped=True)
    assert code == ExitCode.FAILED and text is not None and text.startswith("Traceback")


@pytest.mark.fault(55)
def test_a_compiler_that_a_stop_signal_ended_is_no_error(paths: RunPaths) -> None:
    """Slurm sends its signal to all processes of a job, those that compile among them."""
    broken = torch._dynamo.exc.BackendCompilerFailed(print, RuntimeError("a child process ended"), None)
    assert end(paths, broken)[0] == ExitCode.BAD_FILE
    paths.attempt(1).error(0).unlink()
    assert end(paths, broken, signals=1) == (ExitCode.TRY_AGAIN, None)
