"""Gloo ranks that stay: a process group is made once and takes one piece of work after the other.

Ranks are forked from a server that has imported torch, timm and the worker already.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.parallelism.pickled import dumps
from tests.ranks import IMPORTED
from tests.waiting import HANG_LIMIT_S

#: A collective whose peer is gone would be waited for this long.
LIMIT_S = HANG_LIMIT_S
_LIMIT_AFTER_FAILURE_S = 10.0

Work = Callable[..., Any]


class Group:
    """A number of ranks. ``run`` calls ``work(rank, world_size, *args)``, importable, on all of them."""

    def __init__(self, world_size: int, limit_s: float = LIMIT_S) -> None:
        self.world_size = world_size
        self._limit_s = limit_s
        self._folder = tempfile.TemporaryDirectory(prefix="hpc-train-group-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, world_size, self._folder.name), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, work: Work, *args: Any) -> list[Any]:
        """Return what each rank returned; raise the first rank's error. A group that failed is of no use."""
        told = pickle.dumps((work, args))
        for end in self._ends:
            end.send_bytes(told)
        answers: list[tuple[bool, Any]] = []
        for rank in range(self.world_size):
            # The peers of one that failed may wait for it.
            has_failed = any(not is_done for is_done, _ in answers)
            answers.append(self._answer(rank, _LIMIT_AFTER_FAILURE_S if has_failed else self._limit_s))
        failed = [f"rank {rank}: {answer}" for rank, (is_done, answer) in enumerate(answers) if not is_done]
        if failed:
            raise RankError("\n".join(failed))
        return [answer for _, answer in answers]

    def _answer(self, rank: int, limit_s: float) -> tuple[bool, Any]:
        end = self._ends[rank]
        if not end.poll(limit_s):
            return False, f"no answer in {limit_s:g} s"
        try:
            answer: tuple[bool, Any] = pickle.loads(end.recv_bytes())
        except EOFError:
            return False, "is gone"
        return answer

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


class RankError(Exception):
    """What failed on which rank, with its traceback."""


class Groups:
    """A group of each size that is asked for; one that failed is replaced."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._groups: dict[int, Group] = {}

    def run(self, world_size: int, work: Work, *args: Any) -> list[Any]:
        group = self._groups.get(world_size) or self._groups.setdefault(
            world_size, Group(world_size, self._limit_s)
        )
        try:
            return group.run(work, *args)
        except RankError:
            self._groups.pop(world_size).close()
            raise

    def close(self) -> None:
        while self._groups:
            self._groups.popitem()[1].close()


def _serve(end: Connection, rank: int, world_size: int, folder: str) -> None:
    """Take work until the other end is closed."""
    assert set(IMPORTED) <= sys.modules.keys(), "another fork server was started before"
    torch.set_num_threads(1)
    store = f"file://{Path(folder) / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    while True:
        try:
            work, args = pickle.loads(end.recv_bytes())
        except EOFError:
            return
        try:
            answer: tuple[bool, Any] = (True, work(rank, world_size, *args))
        except Exception:
            answer = (False, traceback.format_exc())
        end.send_bytes(dumps(answer))
