"""Batches that can't travel from a loader process to its rank as shared memory arrive all the same."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_train.errors import StorageError
from hpc_train.training.datasets import transport
from hpc_train.training.datasets.reading import LoaderError
from hpc_train.training.distributed import shared_flags
from tests.datasets.samples import assert_equal, random_split, steps, training
from tests.waiting import HANG_LIMIT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(HANG_LIMIT_S)]

#: Reads all batches of two loader processes; images of 1 MiB.
RANK = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO)
from tests.datasets.samples import random_split, training
split = random_split(64, height=592, width=592)
with training(split, workers=2) as ours, training(split) as expected:
    for (_, left), (_, right) in zip(ours, expected, strict=True):
        assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(left, right, strict=True))
"""


@pytest.fixture
def long_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TMPDIR below which no socket can be bound."""
    folder = tmp_path / ("x" * 110)
    folder.mkdir()
    monkeypatch.setattr(transport.tempfile, "tempdir", str(folder))
    transport.socket_folder.cache_clear()
    return folder


@pytest.fixture(autouse=True)
def _forget_folder() -> Any:
    yield
    transport.socket_folder.cache_clear()


@pytest.mark.usefixtures("long_folder")
def test_sockets_are_in_a_short_folder_if_tmpdir_is_too_long(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    split = random_split(24)
    assert_equal(steps(split, workers=2), steps(split))
    assert "is too long for sockets" in caplog.text


@pytest.mark.usefixtures("long_folder")
def test_without_a_short_folder_batches_go_through_the_pipe(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transport, "_SHORT_FOLDERS", ())
    split = random_split(24)
    assert_equal(steps(split, workers=2), steps(split))
    assert "Traceback" not in capfd.readouterr().err


def test_batches_go_through_the_pipe_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``ulimit -u``, which does not apply to root."""
    rank, start = os.getpid(), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if os.getpid() != rank:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    split = random_split(24)
    assert_equal(steps(split, workers=2), steps(split))


class Raising:
    """Raises an exception of a class that can't be pickled."""

    def __len__(self) -> int:
        return 24

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        class LocalError(Exception):
            pass

        raise LocalError("the data set's own words")


def test_an_exception_that_can_not_be_pickled_is_raised_with_its_traceback() -> None:
    with pytest.raises(LoaderError, match=r"(?s)in batch.*LocalError: the data set's own words"):
        steps(Raising(), workers=1, augment={})


def in_shared_memory(options: str) -> subprocess.CompletedProcess[str]:
    """Run RANK with a /dev/shm of its own, as in a container."""
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs mount namespaces (root)")
    mount = f'mount -t tmpfs -o {options} shm /dev/shm && exec "$0" -c "$1"'
    return subprocess.run(
        ["unshare", "-m", "bash", "-c", mount, sys.executable, RANK],
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=False,
    )


def mapped_files(tensor: torch.Tensor) -> list[str]:
    """Return the files that the memory of a tensor is mapped from."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        region, _, _, _, _, *name = line.split(maxsplit=5)
        begin, end = (int(address, 16) for address in region.split("-"))
        found += name if begin <= tensor.data_ptr() < end else []
    return found


def test_the_shared_memory_of_a_batch_has_no_name() -> None:
    """A loader process that is killed between naming it and unlinking would leave it in /dev/shm."""
    with training(random_split(24), workers=1) as batches:
        batch = next(batches)[1][0]
        (file,) = mapped_files(batch.inputs)
    assert file.startswith("/dev/shm/#") and file.endswith(" (deleted)"), file


def test_views_of_one_storage_are_sent_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ForkingPickler._extra_reducers, torch.UntypedStorage, transport._reduce)
    whole = torch.arange(10)
    first, second = pickle.loads(ForkingPickler.dumps((whole[:5], whole[5:])))
    assert torch.equal(torch.cat([first, second]), whole)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_batches_that_do_not_fit_into_shared_memory_go_through_the_pipe() -> None:
    done = in_shared_memory("size=1m")
    assert done.returncode == 0, done.stderr
    assert "No space left on device (/dev/shm: 1 MiB, of which" in done.stderr
    assert done.stderr.count("goes through a pipe") <= 2, "once per loader process"


def test_shared_memory_that_is_read_only_is_named() -> None:
    done = in_shared_memory("ro")
    assert done.returncode == 1
    assert "StorageError: data.workers: /dev/shm (shared memory) can't be used: Read-only" in done.stderr


def test_without_semaphores_loader_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_flags, "shm_refusal", lambda: "/dev/shm can't be used")
    with pytest.raises(StorageError, match=r"data\.workers: /dev/shm can't be used; .* data\.workers: 0"):
        steps(random_split(24), workers=1)
