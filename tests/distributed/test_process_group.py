"""Ranks find each other; a lost peer is told from an error of one's own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpc_train.errors import PeerLostError, TryAgainError, UsageError, UserError
from hpc_train.rank.env import RankFacts
from hpc_train.run.files import write_json
from hpc_train.training.distributed import process_group
from hpc_train.training.distributed.backends import nccl_words, peer_lost
from hpc_train.training.distributed.process_group import join
from hpc_train.training.distributed.rendezvous import Timeouts
from hpc_train.training.strategies.pieces import new_mesh
from tests.distributed.scripts import run_script
from tests.waiting import HANG_LIMIT_S

CPU = torch.device("cpu")
OR_HERE = "a peer is gone, or NCCL fails on this node"
SECOND_OF_TWO = RankFacts(1, 2, 1, 2, 0, 1)
PRELUDE = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from hpc_train.training.distributed.backends import peer_lost
from hpc_train.training.distributed.process_group import join
from hpc_train.training.distributed.rendezvous import Timeouts
from hpc_train.training.strategies.pieces import new_mesh
from hpc_train.rank.env import RankFacts
facts = RankFacts.from_environment(os.environ)
rendezvous = Path(sys.argv[1])
def joined(**limits):
    return join(facts, torch.device("cpu"), rendezvous, "token", Timeouts(**limits))
def end():
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.fixture(autouse=True)
def _interface_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """``join`` chooses gloo's interface for the whole process."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # remembered, so that it is put back
        monkeypatch.delenv(name)


def test_one_rank_has_a_process_group_too(tmp_path: Path) -> None:
    group = join(RankFacts(), CPU, tmp_path / "rendezvous.json", "token")
    try:
        ones = torch.ones(2)
        dist.all_reduce(ones)
        dist.all_reduce(ones, group=group.control)
        assert ones.tolist() == [1, 1]
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    finally:
        group.leave()
    assert not dist.is_initialized()
    group.leave()


def test_groups_of_another_default_keep_timeouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the simulated groups of a prediction of memory."""
    join(RankFacts(), CPU, tmp_path / "rendezvous.json", "token").leave()
    limited: list[object] = []
    monkeypatch.setattr(process_group, "_set_timeout", lambda timeout, group: limited.append(group))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        new_mesh("cpu", (2, 1), ("replicate", "shard"))
    finally:
        dist.destroy_process_group()
    assert limited == []


@pytest.mark.fault(19)
def test_an_address_of_another_attempt_is_not_taken(tmp_path: Path) -> None:
    rendezvous = tmp_path / "rendezvous.json"
    write_json(rendezvous, {"hosts": ["127.0.0.1"], "port": 1, "token": "older"})
    with pytest.raises(PeerLostError, match=r"rank 0 published no address in .*rendezvous.json within 0.1 s"):
        join(SECOND_OF_TWO, CPU, rendezvous, "token", Timeouts(join_s=0.1))


@pytest.mark.fault(2)
def test_a_stop_ends_the_wait_for_rank_0(tmp_path: Path) -> None:
    with pytest.raises(TryAgainError):
        join(SECOND_OF_TWO, CPU, tmp_path / "rendezvous.json", "token", must_stop=lambda: True)


def test_an_interface_that_the_node_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(UsageError, match=r"^GLOO_SOCKET_IFNAME=no-such-interface: .* is not an interface of"):
        join(RankFacts(0, 2, 0, 1, 0, 2), CPU, tmp_path / "rendezvous.json", "token")


def test_a_store_that_nobody_reaches_is_reported_with_its_address(tmp_path: Path) -> None:
    rendezvous = tmp_path / "rendezvous.json"
    words = r"127\.0\.0\.1, no-such-host\.invalid, port .* set GLOO_SOCKET_IFNAME"
    with socket.socket() as silent, pytest.raises(UserError, match=words):
        silent.bind(("127.0.0.1", 0))  # it refuses, and nobody else takes it
        port, hosts = silent.getsockname()[1], ["127.0.0.1", "no-such-host.invalid"]
        write_json(rendezvous, {"hosts": hosts, "port": port, "token": "token"})
        join(SECOND_OF_TWO, CPU, rendezvous, "token", Timeouts(join_s=0.1))


@pytest.mark.fault(18)
def test_a_rank_that_does_not_come_is_missed(tmp_path: Path) -> None:
    with pytest.raises(PeerLostError, match=r"1 of 2 ranks came within 0\.1 s"):
        join(RankFacts(0, 2, 0, 2, 0, 1), CPU, tmp_path / "rendezvous.json", "token", Timeouts(join_s=0.1))


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:4"), True),
        (RuntimeError("Timed out waiting 3000ms for recv operation to complete"), True),
        (dist.DistNetworkError("The client socket has timed out"), True),
        (dist.DistStoreError("wait timeout after 1000ms, keys: /q"), True),
        (PeerLostError("rank 0 did not come"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("Connection closed by peer"), False),
        (TimeoutError("timed out"), False),
    ],
)
def test_what_counts_as_a_lost_peer(error: Exception, is_lost: bool) -> None:
    assert peer_lost(error) is is_lost
    wrapped = RuntimeError("backward failed")
    wrapped.__cause__ = error
    assert peer_lost(wrapped) is is_lost


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "NCCL error: ncclSystemError: \nLast error:\nno /dev/shm",
            f"{OR_HERE}: NCCL error: ncclSystemError: Last error: no /dev/shm",
        ),
        ("NCCL error: ncclInternalError", f"{OR_HERE}: NCCL error: ncclInternalError"),
        ("NCCL error: ncclRemoteError: remote process exited", None),
    ],
)
def test_what_nccl_says_of_this_node_is_reported_in_a_line(text: str, words: str | None) -> None:
    error = dist.DistBackendError(text)
    assert peer_lost(error) and nccl_words(error) == words
    wrapped = RuntimeError("backward failed")
    wrapped.__cause__ = error
    assert nccl_words(wrapped) == words
    assert nccl_words(RuntimeError("Connection closed by peer")) is None


def test_a_teardown_that_never_ends_keeps_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = join(RankFacts(), CPU, tmp_path / "rendezvous.json", "token", Timeouts(teardown_s=0.1))
    destroy, may_end, ended = dist.destroy_process_group, threading.Event(), []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append(may_end.wait(HANG_LIMIT_S)))
    try:
        group.leave()
        assert not ended
    finally:
        may_end.set()
        destroy()


@pytest.mark.fault(18, 19)
@pytest.mark.slow
def test_ranks_meet_by_the_file_and_a_silent_peer_is_lost_after_the_timeout(tmp_path: Path) -> None:
    rendezvous = tmp_path / "rendezvous.json"
    write_json(rendezvous, {"hosts": ["127.0.0.1"], "port": 1, "token": "older"})
    script = """
group = joined(silence_s=5)
total = torch.tensor([facts.rank + 1])
dist.all_reduce(total)
dist.all_reduce(total, group=group.control)
print(total.item())
of_mesh = new_mesh("cpu", (2, 1), ("replicate", "shard")).get_group("shard")
print(of_mesh._get_backend(torch.device("cpu")).options._timeout.seconds)
done = rendezvous.with_name("done")
if facts.rank == 0:
    for each in (dist.group.WORLD, group.control):
        try:
            dist.all_reduce(total, group=each)
        except RuntimeError as error:
            print(peer_lost(error))
    done.touch()
else:
    while not done.exists():
        time.sleep(0.02)
group.leave()
end()
"""
    first, second = run_script(PRELUDE + script, 2, str(rendezvous))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.split() == ["6", "5", "True", "True"]
    assert second.stdout.split() == ["6", "5"]
    assert json.loads(rendezvous.read_text())["token"] == "token"


@pytest.mark.fault(16)
@pytest.mark.slow
def test_ranks_meet_at_a_given_address_and_a_dead_peer_is_noticed_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    rendezvous = tmp_path / "rendezvous.json"
    script = """
import signal
from hpc_train.errors import PeerLostError
from hpc_train.training.distributed.consensus import Agreement
from hpc_train.rank.signals import StopFlag
group = joined(silence_s=1800)  # no time-out: the test's own limit comes before it
agreement = Agreement(group, StopFlag())
agreement.begin()
assert not agreement.wait().stop
if facts.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    agreement.begin()
    agreement.wait()
except (RuntimeError, PeerLostError) as error:
    print(peer_lost(error))
group.leave()
end()
"""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    first, second = run_script(PRELUDE + script, 2, str(rendezvous), **address)
    assert first.stdout.split() == ["True"], first.stderr
    assert second.returncode == -9
    assert not rendezvous.exists()


#: Of Linux's sched.h.
_CLONE_NEWNET = 0x40000000
#: Joins, and prints whether the error says that a peer is lost, its class and message.
JOINS = f"""{PRELUDE}
try:
    joined(join_s=60)
except Exception as error:
    print(peer_lost(error), type(error).__name__, error)
end()
"""


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loopback_interface_that_is_down_is_named_by_each_rank(tmp_path: Path, world_size: int) -> None:
    if subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs network namespaces (root)")
    script = f"import ctypes\nassert ctypes.CDLL(None).unshare({_CLONE_NEWNET}) == 0\n{JOINS}"
    for rank in run_script(script, world_size, str(tmp_path / "rendezvous.json")):
        said = "False UsageError the loopback interface lo of node "
        assert rank.stdout.startswith(said), (rank.stdout, rank.stderr)


@pytest.mark.slow
def test_a_port_in_use_is_named_and_no_peer_is_called_lost(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        rendezvous = str(tmp_path / "rendezvous.json")
        (only,) = run_script(JOINS, 1, rendezvous, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    assert f"False UsageError MASTER_ADDR=127.0.0.1, MASTER_PORT={port}: rank 0 can't listen" in only.stdout
    assert "EADDRINUSE" in only.stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_signal_ends_the_wait_at_a_given_address(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    facts = RankFacts(rank, 2, rank, 2, 0, 1)
    with pytest.raises(TryAgainError):
        join(facts, CPU, Path("/nowhere"), "token", Timeouts(join_s=HANG_LIMIT_S), must_stop=lambda: True)


def test_a_port_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "auto")
    with pytest.raises(UsageError, match=r"MASTER_ADDR=.*, MASTER_PORT=auto: the port is not a number"):
        join(RankFacts(), CPU, Path("/nowhere"), "token")


def test_an_unusable_interface_is_no_lost_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = RuntimeError(
        "[enforce fail at /gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address"
    )

    def refuse(*arguments: object, **keys: object) -> None:
        raise own

    assert not peer_lost(own)
    monkeypatch.setattr(dist, "init_process_group", refuse)
    with pytest.raises(UsageError, match=r"GLOO_SOCKET_IFNAME=lo: gloo can't listen on .* lo.*device\.cc:84"):
        join(RankFacts(), CPU, tmp_path / "rendezvous.json", "token")


def test_a_silent_address_is_given_up_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_train.training.distributed.rendezvous._ANSWER_LIMIT_S", 0.05)
    rendezvous = tmp_path / "rendezvous.json"
    write_json(rendezvous, {"hosts": ["127.0.0.1"], "port": 1, "token": "token"})
    with pytest.raises(UserError, match=r"does not answer at .*127\.0\.0\.1, port 1, within 0\.05 s"):
        join(SECOND_OF_TWO, CPU, rendezvous, "token", Timeouts(join_s=HANG_LIMIT_S))


@pytest.mark.slow
def test_ranks_of_several_nodes_meet_where_slurm_reaches_the_first(tmp_path: Path) -> None:
    """Two nodes that are one machine: the name they go by says nothing, srun's address does."""
    rendezvous = tmp_path / "rendezvous.json"
    facts = "RankFacts(int(os.environ['RANK']), 2, 0, 1, int(os.environ['RANK']), 2)"
    script = PRELUDE.replace("RankFacts.from_environment(os.environ)", facts)
    script += """
group = joined()
total = torch.tensor([facts.rank + 1])
dist.all_reduce(total)
print(total.item(), os.environ["GLOO_SOCKET_IFNAME"], flush=True)
group.wait_to_leave()
group.leave()
os._exit(0)
"""
    slurm = {"SLURM_PROCID": "0", "SLURM_SRUN_COMM_HOST": "127.0.0.1", "SLURMD_NODENAME": "no-such.invalid"}
    first, second = run_script(script, 2, str(rendezvous), **slurm)
    assert first.stdout.split() == second.stdout.split() == ["3", "lo"], first.stderr + second.stderr
    assert json.loads(rendezvous.read_text())["hosts"][0] == "127.0.0.1"


@pytest.mark.fault(2)
@pytest.mark.slow
def test_one_that_is_stopped_while_others_come_takes_all_with_it(tmp_path: Path) -> None:
    """Nobody is left waiting inside of torch for a rank that has left."""
    script = """
from hpc_train.errors import TryAgainError
from hpc_train.training.distributed import rendezvous as store
here = [rendezvous.with_name(f"here-{rank}") for rank in range(2)]
start_together = store._start_together
def start(*arguments):
    here[facts.rank].touch()
    start_together(*arguments)
store._start_together = start
def must_stop():
    return facts.rank == 1 and all(each.exists() for each in here)
try:
    join(facts, torch.device("cpu"), rendezvous, "token", must_stop=must_stop)
except TryAgainError as error:
    print(error, flush=True)
os._exit(0)
"""
    # A third never comes, so that the first two wait.
    rendezvous = tmp_path / "rendezvous.json"
    ranks = run_script(PRELUDE + script, 2, str(rendezvous), WORLD_SIZE="3", LOCAL_WORLD_SIZE="3")
    assert [rank.stdout.strip() for rank in ranks] == ["stopped before training began"] * 2, ranks[0].stderr
    assert rendezvous.exists()


@pytest.mark.fault(2)
@pytest.mark.slow
def test_whoever_leaves_once_all_have_joined_leaves_nobody_connecting(tmp_path: Path) -> None:
    """Rank 0 takes the store with it: a rank that is about to connect would try on for minutes."""
    script = """
from hpc_train.training.health.hang import Board
clone = dist.TCPStore.clone
def slow_clone(store):
    time.sleep(2)
    return clone(store)
if facts.rank == 1:
    dist.TCPStore.clone = slow_clone
try:
    group = joined()
    if facts.rank == 0:
        os._exit(75)
    Board(group.store, facts.rank).alarm()
except Exception as error:
    print(peer_lost(error), flush=True)
os._exit(0)
"""
    first, second = run_script(PRELUDE + script, 2, str(tmp_path / "rendezvous.json"))
    assert (first.returncode, second.returncode) == (75, 0), first.stderr + second.stderr
    assert second.stdout.split() in ([], ["True"]), second.stderr


@pytest.mark.fault(2)
@pytest.mark.slow
def test_one_that_is_stopped_waits_only_so_long_for_another_to_connect(tmp_path: Path) -> None:
    script = """
from hpc_train.errors import TryAgainError
from hpc_train.training.distributed import process_group
left, connecting = rendezvous.with_name("left"), []
def clone(store):
    connecting.append(store)
    while facts.rank == 1 and not left.exists():
        time.sleep(0.02)
    return store
dist.TCPStore.clone = clone
process_group._CONNECT_LIMIT_S = 0.5
try:
    join(facts, torch.device("cpu"), rendezvous, "token", must_stop=lambda: facts.rank == 0 and connecting)
except TryAgainError as error:
    print(error, flush=True)
    left.touch()
except RuntimeError as error:
    print(peer_lost(error), flush=True)
os._exit(0)
"""
    first, second = run_script(PRELUDE + script, 2, str(tmp_path / "rendezvous.json"))
    assert first.stdout.strip() == "stopped before training began", first.stderr
    assert second.stdout.strip() == "True", second.stderr
    assert (first.returncode, second.returncode) == (0, 0), second.stderr


@pytest.mark.slow
def test_ranks_leave_together_however_long_one_takes(tmp_path: Path) -> None:
    script = """
group = joined(leave_s=600)
last = rendezvous.with_name("last-word")
if facts.rank == 0:
    time.sleep(0.5)
    last.touch()
group.wait_to_leave()
print(last.exists(), flush=True)
os._exit(0)
"""
    ranks = run_script(PRELUDE + script, 2, str(tmp_path / "rendezvous.json"))
    assert [rank.stdout.strip() for rank in ranks] == ["True", "True"], ranks[0].stderr


@pytest.mark.fault(17)
@pytest.mark.slow
def test_one_that_hangs_keeps_nobody_from_leaving(tmp_path: Path) -> None:
    script = """
group = joined(leave_s=1)
if facts.rank == 0:
    group.wait_to_leave()
    print("left", flush=True)
    rendezvous.with_name("left").touch()
else:
    while not rendezvous.with_name("left").exists():
        time.sleep(0.02)
os._exit(0)
"""
    first, _ = run_script(PRELUDE + script, 2, str(tmp_path / "rendezvous.json"))
    assert first.stdout.strip() == "left", first.stderr
