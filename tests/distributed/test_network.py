"""Where rank 0 listens, and what the others try."""

from __future__ import annotations

import ctypes
import os
import re
import socket
from contextlib import AbstractContextManager, nullcontext

import pytest

from hpc_train.errors import UsageError
from hpc_train.rank import network


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What names resolve to; this machine is called ``node1``, 127.0.0.5 is as if remote."""
    known: dict[str, list[str]] = {}
    monkeypatch.setattr(network, "_resolved", lambda name: known.get(name, []))
    monkeypatch.setattr(network, "is_loopback", lambda address: address == "127.0.0.1")
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    monkeypatch.setattr(socket, "getfqdn", lambda: "node1.cluster")
    return known


def listened(environ: dict[str, str], num_nodes: int = 2) -> tuple[str, list[str]]:
    listener, hosts = network.listen(environ, num_nodes, 10)
    with listener:
        assert network.reach(hosts[:1], listener.getsockname()[1]) is not None
        return listener.getsockname()[0], hosts


def test_one_node_listens_to_itself_alone(names: dict[str, list[str]]) -> None:
    names["node1"] = ["127.0.0.5"]
    assert listened({"SLURM_SRUN_COMM_HOST": "127.0.0.5"}, num_nodes=1) == ("127.0.0.1", ["127.0.0.1"])


def test_slurms_own_address_comes_first_and_names_are_published_too(names: dict[str, list[str]]) -> None:
    names["node1"] = ["127.0.0.7"]
    slurm = {"SLURM_PROCID": "0", "SLURM_SRUN_COMM_HOST": "127.0.0.5", "SLURMD_NODENAME": "n1"}
    assert listened(slurm) == ("127.0.0.5", ["127.0.0.5", "n1", "node1", "node1.cluster"])


@pytest.mark.parametrize(
    ("own", "address_of_srun", "expected"),
    [
        (["127.0.0.1", "127.0.0.7"], "192.0.2.200", "127.0.0.7"),  # as Debian has it: loopback comes first
        ([], "127.0.0.1", "127.0.0.1"),
        (["127.0.0.7"], "127.0.0.1", "127.0.0.7"),
    ],
    ids=["another node's", "loopback alone", "a name besides loopback"],
)
def test_loopback_and_an_address_of_another_node_come_last(
    names: dict[str, list[str]], own: list[str], address_of_srun: str, expected: str
) -> None:
    names["node1"] = own
    assert listened({"SLURM_PROCID": "0", "SLURM_SRUN_COMM_HOST": address_of_srun})[0] == expected


def test_a_loopback_name_is_skipped(names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    # As on Debian: srun on the first node finds its own name at 127.0.1.1.
    monkeypatch.setattr(network, "interface_addresses", lambda: [("lo", "127.0.0.1"), ("eth0", "127.0.0.7")])
    slurm = {"SLURM_PROCID": "0", "SLURM_SRUN_COMM_HOST": "127.0.0.1"}
    assert listened(slurm | {"SLURMD_NODENAME": "node1"})[0] == "127.0.0.7"
    assert listened(slurm | {"SLURMD_NODENAME": "n1"})[0] == "127.0.0.1"


def test_the_sites_interface_decides(names: dict[str, list[str]]) -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_SRUN_COMM_HOST": "127.0.0.5", "GLOO_SOCKET_IFNAME": "lo"}
    assert listened(slurm)[0] == "127.0.0.1"
    with pytest.raises(UsageError, match="no-such is not an interface of node node1, which has lo, "):
        network.listen(slurm | {"GLOO_SOCKET_IFNAME": "no-such"}, 2, 10)


def test_without_slurm_a_machine_without_a_name_is_refused(names: dict[str, list[str]]) -> None:
    with pytest.raises(UsageError, match="MASTER_ADDR: not set"):
        network.listen({}, 2, 10)


def test_the_first_host_that_answers_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        hosts = ["no-such-host.invalid", "127.0.0.2", "127.0.0.1"]
        assert network.reach(hosts, port) == ("127.0.0.1", "127.0.0.1")
    assert network.reach(hosts, port) is None


@pytest.fixture
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize(
    ("family", "address"),
    [(socket.AF_INET, "1.2.3.4"), (socket.AF_INET6, "506:708:90a::"), (socket.AF_PACKET, "None")],
)
def test_an_entry_has_an_address_of_the_internet_or_none(family: int, address: str) -> None:
    """A port, an IPv4 address or the flow, and an IPv6 address."""
    data = (ctypes.c_ubyte * 26)(0, 0, *range(1, 11))
    entry = network._Interface(address=ctypes.pointer(network._SocketAddress(family, data)))
    assert str(network._address_in(entry)) == address


@pytest.mark.usefixtures("_no_choice")
def test_interfaces_are_found_by_their_address() -> None:
    assert ("lo", "127.0.0.1") in network.interface_addresses()
    network.use_interface_of("127.0.0.2")  # loopback as a whole is lo's
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    network.use_interface_of("192.0.2.200")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo", "what the site or an earlier call says stays"


@pytest.mark.usefixtures("_no_choice")
@pytest.mark.parametrize(
    ("usable", "chosen", "for_nccl"),
    [
        (["lo", "virbr0", "eno1", "enx7"], "", "=eno1"),
        (["lo", "virbr0", "eno1"], "^virbr", "^virbr"),
        (["lo", "eno1", "ib0"], "", ""),
    ],
    ids=["the one over which ranks met", "the site's", "InfiniBand, which NCCL prefers"],
)
def test_nccl_uses_the_interface_over_which_the_ranks_met(
    usable: list[str], chosen: str, for_nccl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own choice is the first that is not loopback or Docker's: virbr0."""
    monkeypatch.setattr(network, "usable_interfaces", lambda: usable)
    addresses = [(name, f"192.0.2.{number}") for number, name in enumerate(usable)]
    monkeypatch.setattr(network, "interface_addresses", lambda: addresses)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", chosen)
    network.use_interface_of(dict(addresses)["eno1"])
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("eno1", for_nccl)
    assert f"{for_nccl.lstrip('=') or 'that it chose'}; profile: " in network.cant_connect("NCCL", os.environ)


def test_an_unknown_address_leaves_the_choice_to_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    network.use_interface_of("192.0.2.200")
    assert os.environ["GLOO_SOCKET_IFNAME"] == ""


def test_polls_come_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand ranks must not look a hundred times a second."""
    now, pauses = 0.0, []

    def sleep(pause_s: float) -> None:
        nonlocal now
        now += pause_s
        pauses.append(pause_s)

    monkeypatch.setattr(network.time, "monotonic", lambda: now)
    monkeypatch.setattr(network.time, "sleep", sleep)
    count = len(list(network.polls(600.0)))
    assert pauses[0] <= 0.02
    assert 600 <= count <= 1300
    assert 0.5 <= max(pauses) <= 1.0
    assert now == pytest.approx(600.0)
    assert len(set(pauses[20:40])) > 10, "all ranks look at the same moment"


_MISSING = "is not an interface of node n1, which has lo, eth0"
_DOWN = "of node n1 is down or has no IP address; lo, eth0 can be used"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("GLOO_SOCKET_IFNAME", "ib77", f"ib77 {_MISSING}"),
        ("GLOO_SOCKET_IFNAME", "lo,ib77", f"ib77 {_MISSING}"),
        ("GLOO_SOCKET_IFNAME", "mlx0", f"mlx0 {_DOWN}"),
        ("GLOO_SOCKET_IFNAME", "lo,mlx0", f"mlx0 {_DOWN}"),
        ("GLOO_SOCKET_IFNAME", "lo", None),
        ("GLOO_SOCKET_IFNAME", "", None),
        ("NCCL_SOCKET_IFNAME", "ib", f"ib {_MISSING}"),
        ("NCCL_SOCKET_IFNAME", "=ib77", f"ib77 {_MISSING}"),
        ("NCCL_SOCKET_IFNAME", "mlx", f"mlx0 {_DOWN}"),
        ("NCCL_SOCKET_IFNAME", "ib,e", None),
        ("NCCL_SOCKET_IFNAME", "mlx,lo", None),
        ("NCCL_SOCKET_IFNAME", "=eth0", None),
        ("NCCL_SOCKET_IFNAME", "=eth", f"eth {_MISSING}"),
        ("NCCL_SOCKET_IFNAME", "^docker", None),
    ],
)
def test_an_interface_that_is_missing_or_down_is_named(
    variable: str, value: str, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "mlx0")])
    monkeypatch.setattr(network, "usable_interfaces", lambda: ["lo", "eth0"])
    refusal: AbstractContextManager[object] = nullcontext()
    if message is not None:
        refusal = pytest.raises(UsageError, match=re.escape(f"{variable}={value}: {message}"))
    with refusal:
        network.check_interfaces({variable: value, "SLURMD_NODENAME": "n1"}, [variable])


def test_interfaces_that_are_up_are_usable() -> None:
    assert "lo" in network.usable_interfaces()
    network.check_loopback({})
