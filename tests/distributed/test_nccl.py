"""Both of torch's classes of NCCL group: which one is made, on which device, and what their errors mean."""

from __future__ import annotations

import json
import mmap
import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from hpc_train.errors import ExitCode, NetworkFaultError, PeerLostError
from hpc_train.rank import network
from hpc_train.rank.env import RankFacts
from hpc_train.training.distributed import backends
from hpc_train.training.distributed.backends import Fault, fault_in, nccl_words, peer_lost
from hpc_train.training.distributed.process_group import join
from hpc_train.training.distributed.rendezvous import Timeouts
from hpc_train.training.health.watchdog import collectives_begun
from tests.distributed.test_env import SLURM

HAS_NCCL2 = hasattr(distributed_c10d, "ProcessGroupNCCL2")
needs_nccl2 = pytest.mark.skipif(not HAS_NCCL2, reason="needs torch 2.15")
VARIABLES = (backends.CLASS_VARIABLE, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCH_FR_BUFFER_SIZE")


@pytest.fixture(autouse=True)
def _variables_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.setenv(name, "")  # remembered, so that it is put back
        monkeypatch.delenv(name)


LEGACY = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, {}, NCCL version 2.28.9\n{}"
INFO, WARN = "(run with NCCL_DEBUG=INFO for details)", "(run with NCCL_DEBUG=WARN for details)"
REMOTE = "remote process exited or there was a network error"
INTERNAL = "internal error - please report this issue to the NCCL developers"
INIT = "Failed to initialize NCCL communicator: "


def legacy(words: str, name: str, last: str) -> str:
    """The text of an error of ProcessGroupNCCL."""
    return LEGACY.format(words, f"{name}\nLast error:\n{last}")


#: As ProcessGroupNCCL 2.11, then ProcessGroupNCCL2, raise them.
TEXTS = [
    (legacy(REMOTE, "ncclRemoteError: A call failed possibly due to a network error", "refused"), Fault.PEER),
    (
        legacy(
            f"unhandled system error {INFO}", "ncclSystemError: System call (e.g. socket)", "no interface"
        ),
        Fault.SYSTEM,
    ),
    (legacy(INTERNAL, "ncclInternalError: Internal check failed", REMOTE), Fault.SYSTEM),
    (legacy(f"unhandled cuda error {INFO}", "ncclUnhandledCudaError: Call to CUDA", "memory"), Fault.DEVICE),
    (
        legacy(f"invalid usage {WARN}", "ncclInvalidUsage: This usually reflects", "Duplicate GPU detected"),
        Fault.USAGE,
    ),
    ("NCCL communicator was aborted on rank 1.", Fault.PEER),
    (
        "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0], but: wait timeout",
        Fault.PEER,
    ),
    ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 600030", Fault.PEER),
    (f"nccl hit async error on rank 1: {REMOTE}", Fault.PEER),
    (f"{INIT}{REMOTE}\nNCCL Last Error: socketPollConnect", Fault.PEER),
    (f"{INIT}unhandled system error {INFO}", Fault.SYSTEM),
    (f"{INIT}{INTERNAL}", Fault.SYSTEM),
    (f"{INIT}invalid usage {WARN}\nNCCL Last Error: Duplicate GPU detected", Fault.USAGE),
    (f"NCCL AllReduce failed: unhandled cuda error {INFO}", Fault.DEVICE),
    ("ProcessGroupNCCL is bound to device cuda:2 but the tensor is on cuda:0", Fault.USAGE),
    ("NCCL communicator was aborted after a previous error", Fault.PEER),
    ("NCCL operation timed out", Fault.PEER),
    ("timeout - collective operation timed out", Fault.PEER),
    ("Connection closed by peer", None),
    ("CUDA error: device-side assert triggered", None),
]


@pytest.mark.parametrize("raised", [RuntimeError, dist.DistBackendError])
@pytest.mark.parametrize(("text", "fault"), TEXTS)
def test_texts_of_both_classes(text: str, fault: Fault | None, raised: type[RuntimeError]) -> None:
    assert fault_in(text) is fault
    if fault is not None:
        error = raised(text)
        assert peer_lost(error) is (fault in {Fault.PEER, Fault.SYSTEM})
        assert (nccl_words(error) is not None) is (fault is Fault.SYSTEM)


@pytest.mark.slow
def test_the_texts_of_nccl2_are_in_the_installed_torch() -> None:
    """What ProcessGroupNCCL2 writes itself, as opposed to what NCCL does."""
    if not HAS_NCCL2 or not dist.is_nccl_available():
        pytest.skip("needs torch 2.15 with NCCL")
    path = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        for text in (
            b"nccl hit async error on rank ",
            INIT.encode(),
            b"NCCL AllReduce failed",
            b"ProcessGroupNCCL is bound to device ",
            b"NCCL communicator was aborted after a previous error",
            b"timeout - collective operation timed out",
            b"Operation timed out after ",
        ):
            assert library.find(text) >= 0, text


class Made:
    """What ``join`` passes to ``init_process_group``, with gloo in NCCL's place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arguments: dict[str, Any] = {}
        self.timeouts: list[timedelta] = []
        self._make = dist.init_process_group
        monkeypatch.setattr(dist, "init_process_group", self.init)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(
            "hpc_train.training.distributed.process_group._set_timeout",
            lambda timeout, group: self.timeouts.append(timeout),
        )

    def init(self, backend: str, **arguments: Any) -> None:
        self.arguments = {"backend": backend} | arguments
        self._make("gloo", **{key: value for key, value in arguments.items() if key != "device_id"})


@pytest.mark.parametrize("chosen", [None, "0", "1"])
def test_class_and_device(chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if chosen is not None:
        monkeypatch.setenv(backends.CLASS_VARIABLE, chosen)
    made, device = Made(monkeypatch), torch.device("cuda:1")
    group = join(RankFacts(), device, tmp_path / "rendezvous.json", "token", Timeouts(join_s=7, silence_s=9))
    try:
        assert made.arguments["backend"] == "cpu:gloo,cuda:nccl"
        assert made.arguments["timeout"] == timedelta(seconds=7)
        assert made.timeouts == [timedelta(seconds=9)], "a silent peer has longer than one that connects"
        assert os.environ[backends.CLASS_VARIABLE] == (chosen or "0")
        assert made.arguments.get("device_id") == (device if chosen == "1" and HAS_NCCL2 else None)
        assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000"
        assert "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ, "deprecated: torch warns on each rank"
        assert os.environ["NCCL_SOCKET_IFNAME"] == f"={network.loopback_interface()}"
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()
        assert group.device == device


@needs_nccl2
@pytest.mark.parametrize("chosen", [None, "0", "1"])
def test_torch_registers_the_chosen_class(chosen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own code: the variable counts until the first group with NCCL is made."""
    if chosen is not None:
        monkeypatch.setenv(backends.CLASS_VARIABLE, chosen)
    creators: list[Any] = []
    monkeypatch.setattr(dist.Backend, "register_backend", lambda name, creator, **_: creators.append(creator))
    monkeypatch.setattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    backends.prepare(torch.device("cuda:0"), os.environ)
    distributed_c10d._register_builtin_nccl_backend()
    is_second = creators == [distributed_c10d._create_nccl2_process_group]
    assert backends.uses_nccl2() is is_second is (chosen == "1")


def slurm_ranks(tasks: list[int], *, is_cyclic: bool = False) -> list[RankFacts]:
    """The ranks of a job, as ``srun`` numbers them by blocks or in turn."""
    places = [(node, local) for node, count in enumerate(tasks) for local in range(count)]
    if is_cyclic:
        places.sort(key=lambda place: (place[1], place[0]))
    text = ",".join(map(str, tasks))
    return [
        RankFacts.from_environment(
            SLURM
            | {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(len(places)), "SLURM_LOCALID": str(local)}
            | {"SLURM_NODEID": str(node), "SLURM_NNODES": str(len(tasks)), "SLURM_TASKS_PER_NODE": text}
        )
        for rank, (node, local) in enumerate(places)
    ]


@needs_nccl2
@pytest.mark.parametrize(
    "ranks",
    [
        slurm_ranks([2, 2, 2, 1]),
        slurm_ranks([2, 2]),
        slurm_ranks([4, 4]),
        slurm_ranks([4, 4], is_cyclic=True),
        slurm_ranks([1]),
    ],
    ids=["uneven", "half-used", "full", "cyclic", "one"],
)
def test_nccl2_uses_the_training_device(ranks: list[RankFacts], monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own rule: without ``device_id`` it is the rank modulo the devices of the node."""
    monkeypatch.setenv(backends.CLASS_VARIABLE, "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for facts in ranks:
        device = torch.device("cuda", facts.local_rank)
        bound = backends.prepare(device, os.environ).get("device_id")
        options: Any = SimpleNamespace(
            enable_reconfigure=False, group_rank=facts.rank, global_ranks_in_group=[],
            process_group=SimpleNamespace(bound_device_id=bound),
        )  # fmt: skip
        assert distributed_c10d._nccl2_device(options) == device


def failing(text: str) -> Any:
    def fail(*arguments: object, **keys: object) -> None:
        raise RuntimeError(text)

    return fail


@pytest.mark.fault(53)
@pytest.mark.parametrize("when", ["init_process_group", "all_reduce"])
def test_an_early_error_names_interfaces(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = "Failed to initialize NCCL communicator: unhandled system error\nno socket interface found"
    remote = "Failed to initialize NCCL communicator: remote process exited or there was a network error"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo")

    def connect() -> None:
        group = join(RankFacts(), torch.device("cpu"), tmp_path / "rendezvous.json", "token")
        try:
            with monkeypatch.context() as patch:
                patch.setattr(dist, "all_reduce", failing(text))
                group.connect()
        finally:
            group.leave()

    words = "NCCL can't connect over its interface lo; profile: network_interface (NCCL_SOCKET_IFNAME); "
    for text, expected in ((system, NetworkFaultError), (remote, PeerLostError)):
        with monkeypatch.context() as patch, pytest.raises(expected) as caught:
            if when == "init_process_group":
                patch.setattr(dist, when, failing(text))
            connect()
        assert words in str(caught.value) and " ".join(text.split()) in str(caught.value)
        assert peer_lost(caught.value) is (expected is PeerLostError)
        assert expected is NetworkFaultError or nccl_words(caught.value) == str(caught.value)
        assert caught.value.exit_code == (ExitCode.PEER_LOST if text == remote else ExitCode.FAILED)


def test_no_number_without_counted_collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As c10d's Backend answers for ProcessGroupNCCL2; gloo counts."""
    group = join(RankFacts(), torch.device("cpu"), tmp_path / "rendezvous.json", "token")
    try:
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        before = collectives_begun()[f"{name} cpu"]
        dist.all_reduce(torch.zeros(1))
        assert collectives_begun()[f"{name} cpu"] == before + 1
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        get_backend = dist.ProcessGroup._get_backend

        class NoNumbers:
            def _get_sequence_number_for_group(self) -> int:
                raise RuntimeError("Backend nccl2 does not yet support sequence numbers")

        def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
            return NoNumbers() if device.type == "cuda" else get_backend(group, device)

        monkeypatch.setattr(dist.ProcessGroup, "_get_backend", backend_of)
        assert f"{name} cpu" in collectives_begun()
        assert f"{name} cuda" not in collectives_begun()
    finally:
        monkeypatch.undo()
        group.leave()


def test_a_recorder_without_collectives_has_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a group of gloo alone, torch's own dump for NCCL is a frame around nothing."""
    if dist.is_nccl_available():
        frame = c10d._dump_nccl_trace_json()  # type: ignore[attr-defined]
        assert len(frame) > 50 and "entries" not in json.loads(frame)
    assert backends.recorded_collectives() is None
    full = json.dumps({"entries": [{"profiling_name": "nccl2:all_reduce"}]}).encode()
    monkeypatch.setattr(
        c10d, "_dump_fr_trace_json", lambda backend: full if backend == "nccl2" else b"{}", raising=False
    )
    assert backends.recorded_collectives() == full
