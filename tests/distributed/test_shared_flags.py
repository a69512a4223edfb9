"""Numbers in shared memory; that a dead rank is noticed is in test_consensus."""

from __future__ import annotations

import mmap
import random
import threading
import time
from pathlib import Path

import pytest

from hpc_train.errors import PeerLostError
from hpc_train.training.distributed.shared_flags import NUM_BITS, SharedFlags
from tests.waiting import HANG_LIMIT_S


def of_ranks(folder: Path, count: int, silence_s: float = 60.0, room: int = 0) -> list[SharedFlags]:
    """Return the view of each rank, all in this process."""
    file = folder / "flags"
    file.write_bytes(bytes(mmap.PAGESIZE + room))
    found = []
    for rank in range(count):
        with file.open("r+b") as opened:
            memory = mmap.mmap(opened.fileno(), 0)
        found.append(SharedFlags(rank, count, -1, memory, silence_s))
    return found


@pytest.fixture
def all_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    # Locks exclude processes, and here all ranks are in one.
    monkeypatch.setattr(SharedFlags, "_is_alive", lambda *_: True)


@pytest.mark.usefixtures("all_alive")
def test_every_rank_reads_what_all_wrote_in_the_same_exchange(tmp_path: Path) -> None:
    ranks, rounds = of_ranks(tmp_path, 3), 300
    read: list[list[list[int]]] = [[] for _ in ranks]

    def run(flags: SharedFlags) -> None:
        drawn = random.Random(flags.rank)
        for number in range(rounds):
            flags.write(number * 10 + flags.rank)
            if drawn.random() < 0.1:
                time.sleep(drawn.random() * 2e-3)
            read[flags.rank].append(flags.wait())

    threads = [threading.Thread(target=run, args=(flags,)) for flags in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_LIMIT_S)
    expected = [[number * 10 + rank for rank in range(3)] for number in range(rounds)]
    assert read == [expected] * 3


def test_the_largest_number_is_read_as_written(tmp_path: Path) -> None:
    (alone,) = of_ranks(tmp_path, 1)
    for number in (2**NUM_BITS - 1, 0, 1):
        alone.write(number)
        assert alone.wait() == [number]


@pytest.mark.usefixtures("all_alive")
def test_a_silent_rank_is_named_after_the_limit(tmp_path: Path) -> None:
    first, second, _ = of_ranks(tmp_path, 3, silence_s=0.3)
    for flags in (first, second):
        flags.write(1)
    began = time.monotonic()
    with pytest.raises(PeerLostError, match=r"^rank 2: no answer within 0\.3 s$"):
        first.wait()
    assert time.monotonic() - began >= 0.3
