"""What a rank costs by the number of ranks: hpc-train beside torch's gloo group alone.

    python -m benchmarks.ranks [--ranks 2 4 8 16 32] [--quick]

CPU ranks on one machine, forked from a process that has imported torch, train a stub model under DDP. The
bare ranks form torch's gloo group; ours join as in training, with the watchdog's connection to the store, and
agree at each step over the network, as ranks on several nodes do. Each rank counts its open files, its
private memory, and per step the messages and bytes that its TCP connections send (segments with data, by the
kernel). The largest count of a rank other than 0, which has the store, is reported; growth is fitted from 8
ranks on, below which gloo splits what it sends further with each rank. Up to 1024 ranks are simulated: what
the consensus requests of its group in a step, and the watchdog of the store in a tick. Writes
benchmarks/results/ranks.json. Takes about two minutes.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (adds the backend "fake")
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measuring import conditions, growth, parser, report
from hpc_train.paths import AttemptPaths
from hpc_train.rank.env import RankFacts
from hpc_train.rank.signals import StopFlag
from hpc_train.training.distributed.consensus import Agreement
from hpc_train.training.distributed.process_group import Group, join
from hpc_train.training.distributed.rendezvous import Timeouts
from hpc_train.training.health.progress import Progress
from hpc_train.training.health.watchdog import Watchdog

BARE, OURS, ADDED = "torch's gloo group", "hpc-train", "hpc-train adds"
RANKS, SIMULATED = (2, 4, 8, 16, 32), (2, 8, 32, 128, 1024)
QUICK_RANKS, QUICK_SIMULATED = (2, 3), (2, 64)
RANKS_PER_NODE = 8
FITTED_FROM = 8
_STEPS = 20
_LIMIT = timedelta(seconds=120)
#: Places in Linux's ``struct tcp_info``: bytes that the peer has acknowledged, segments sent with data.
_BYTES, _SEGMENTS, _TCP_INFO_SIZE = (120, "Q"), (156, "I"), 256
_PRIVATE = re.compile(r"^Private_\w+:\s+(\d+) kB$", re.MULTILINE)
#: What is counted → the title and the unit of its table.
TABLES = {
    "files": ("Open files of a rank by ranks", "files"),
    "memory": ("Private memory of a rank by ranks", "MiB"),
    "messages": ("Messages of a rank in a step by ranks", "messages"),
    "bytes": ("Bytes of a rank in a step by ranks", "bytes"),
}
_REMARK = "Over {steps} steps of a stub model: the most of any rank but 0; fitted from {ranks} ranks on"


@dataclass
class Connections:
    """The sums over this process's TCP connections so far."""

    messages: int = 0
    bytes: int = 0

    @classmethod
    def count(cls) -> Connections:
        found = cls()
        for connection in _tcp_connections():
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
            found.messages += struct.unpack_from(_SEGMENTS[1], info, _SEGMENTS[0])[0]
            found.bytes += struct.unpack_from(_BYTES[1], info, _BYTES[0])[0]
        return found


def _tcp_connections() -> Iterator[socket.socket]:
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208
        path = f"/proc/self/fd/{number}"
        if os.path.exists(path) or os.path.islink(path):  # noqa: PTH110, PTH114
            if not os.readlink(path).startswith("socket:"):  # noqa: PTH115
                continue
            with socket.socket(fileno=os.dup(int(number))) as found:
                if found.type == socket.SOCK_STREAM and found.family != socket.AF_UNIX:
                    yield found


def _counts() -> dict[str, float]:
    """Return what a rank holds now; the listing's own descriptor excluded."""
    memory_kib = sum(map(int, _PRIVATE.findall(Path("/proc/self/smaps_rollup").read_text(encoding="utf-8"))))
    return {"files": len(os.listdir("/proc/self/fd")) - 1, "memory": memory_kib / 1024}  # noqa: PTH208


def _train(step: Callable[[Callable[[], object]], object]) -> dict[str, float]:
    """Train the stub model; return what a step sends. ``step`` runs one, with what belongs around it."""
    model = DistributedDataParallel(nn.Linear(8, 8))

    def forward_backward() -> None:
        model(torch.ones(4, 8)).sum().backward()

    for _ in range(3):  # the first ones build buckets and connections
        step(forward_backward)
    before = Connections.count()
    for _ in range(_STEPS):
        step(forward_backward)
    after = Connections.count()
    sent = {"messages": after.messages - before.messages, "bytes": after.bytes - before.bytes}
    return {name: count / _STEPS for name, count in sent.items()}


def _bare(facts: RankFacts, folder: Path) -> dict[str, float]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rendezvous = folder / "port"
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True) if facts.rank == 0 else None
    if store is not None:
        rendezvous.with_suffix(".new").write_text(str(store.port))
        rendezvous.with_suffix(".new").rename(rendezvous)
    else:
        while not rendezvous.exists():
            os.sched_yield()
        store = dist.TCPStore("127.0.0.1", int(rendezvous.read_text()), None, is_master=False)
    dist.init_process_group("gloo", store=store, rank=facts.rank, world_size=facts.world_size, timeout=_LIMIT)
    sent = _train(lambda work: work())
    dist.barrier()
    return _counts() | sent


def _ours(facts: RankFacts, folder: Path) -> dict[str, float]:
    group = join(facts, torch.device("cpu"), folder / "rendezvous.json", "token")
    group = replace(group, shared_flags=None)
    progress = Progress()
    watchdog = _watchdog(facts, folder, group.store, progress)
    watchdog.start()
    agreement = Agreement(group, StopFlag())

    def step(work: Callable[[], object]) -> None:
        agreement.begin()
        work()
        agreement.wait()

    sent = _train(step)
    counts = _counts() | sent
    group.wait_to_leave()
    return counts


def _watchdog(facts: RankFacts, folder: Path, store: Any, progress: Progress) -> Watchdog:
    attempt = AttemptPaths(folder / "1")
    limits = {"hang_after_s": 600.0, "first_hang_after_s": 600.0}
    return Watchdog(attempt, facts, "n1", store, progress, **limits, end=os._exit)


def measure(ranks: int, arm: Callable[[RankFacts, Path], dict[str, float]]) -> dict[str, float]:
    """Return the most that a rank other than 0 has of each count. Raises RuntimeError if a rank fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "1").mkdir()
        children = [_forked(RankFacts(rank, ranks, rank, ranks, 0, 1), folder, arm) for rank in range(ranks)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        counts = [json.loads((folder / f"{rank}.counts").read_text()) for rank in range(1, ranks)]
    return {key: max(each[key] for each in counts) for key in TABLES}


def _forked(facts: RankFacts, folder: Path, arm: Callable[[RankFacts, Path], dict[str, float]]) -> int:
    """Fork a rank, which writes its counts; return its process id."""
    if child := os.fork():
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        counts = arm(facts, folder)
        (folder / f"{facts.rank}.counts").write_text(json.dumps(counts))
        code = 0
    finally:
        os._exit(code)


class _Asked(TorchDispatchMode):
    """Counts the collectives that are asked of process groups, and the bytes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.bytes = 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self.operations += 1
            self.bytes += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


@dataclass
class CountingStore:
    """A store in this process that counts the requests made of it."""

    requests: int = 0
    _store: HashStore = field(default_factory=HashStore)

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self._store, name)


def simulated(ranks: int) -> dict[str, float]:
    """Return what the first rank of the last node asks for: of its group per step, of the store per tick."""
    rank = max(0, ranks - RANKS_PER_NODE)
    dist.init_process_group("fake", store=HashStore(), rank=rank, world_size=ranks)
    try:
        world = dist.group.WORLD
        assert world is not None
        group = Group(rank, ranks, torch.device("cpu"), world, HashStore(), Timeouts())
        agreement = Agreement(group, StopFlag())
        with _Asked() as asked:
            for _ in range(_STEPS):
                agreement.exchange()
    finally:
        dist.destroy_process_group()
    found = {"collectives per step": asked.operations, "bytes per step": asked.bytes}
    requests = {"store requests per tick": _requests(rank, ranks)}
    return {name: count / _STEPS for name, count in found.items()} | requests


def _requests(rank: int, ranks: int) -> float:
    """Return the requests of a tick of the first watchdog of a node once all watchdogs are running."""
    store, per_node = CountingStore(), min(ranks, RANKS_PER_NODE)
    with tempfile.TemporaryDirectory() as folder:
        watchdogs = [
            _watchdog(
                RankFacts(each, ranks, each - rank, per_node, rank // per_node, -(-ranks // per_node)),
                Path(folder),
                store,
                Progress(),
            )
            for each in range(rank, rank + per_node)
        ]
        _watchdog(RankFacts(0, ranks, 0, per_node, 0, 2), Path(folder), store, Progress())._exchange()
        for _ in range(2):
            for watchdog in reversed(watchdogs):
                watchdog._exchange()
        before = store.requests
        watchdogs[0]._exchange()
    return store.requests - before


def results(
    found: Mapping[str, Mapping[int, Mapping[str, float]]], simulations: Mapping[int, Mapping[str, float]]
) -> list[dict[str, Any]]:
    """Return the tables. ``found``: by arm and number of ranks, what ``measure`` returns."""
    tables = []
    for key, (title, unit) in TABLES.items():
        costs = {arm: {ranks: each[key] for ranks, each in by.items()} for arm, by in found.items()}
        costs[ADDED] = {ranks: costs[OURS][ranks] - costs[BARE][ranks] for ranks in costs[OURS]}
        remark = _REMARK.format(steps=_STEPS, ranks=FITTED_FROM)
        tables.append(growth(title, unit, costs, "ranks", since=FITTED_FROM, remark=remark))
    asked = {
        f"{OURS}: {name}": {ranks: each[name] for ranks, each in simulations.items()}
        for name in next(iter(simulations.values()))
    }
    remark = f"Counted on one rank of simulated nodes of {RANKS_PER_NODE}; nothing is sent"
    return [
        *tables,
        growth(
            "What consensus and watchdog request by ranks",
            "",
            asked,
            "ranks",
            since=FITTED_FROM,
            remark=remark,
        ),
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="at least 2 each")
    arguments = options.parse_args()
    sizes: Sequence[int] = QUICK_RANKS if arguments.quick else sorted(arguments.ranks)
    sys.stdout.flush()  # forked ranks would print it again
    arms = {BARE: _bare, OURS: _ours}
    found = {name: {ranks: measure(ranks, arm) for ranks in sizes} for name, arm in arms.items()}
    simulations = {ranks: simulated(ranks) for ranks in (QUICK_SIMULATED if arguments.quick else SIMULATED)}
    report("ranks", arguments, conditions(), tables=results(found, simulations))


if __name__ == "__main__":
    main()
