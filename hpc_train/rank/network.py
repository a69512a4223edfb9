"""Addresses and network interfaces by which the ranks reach rank 0.

Called by ``process_group``. Rank 0's store listens only on the address by which Slurm reaches the node, so
that it is not visible outside the cluster.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import random
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from hpc_train.errors import UsageError
from hpc_train.rank.env import node_name

LOOPBACK = "127.0.0.1"
#: Assumed: a node of the same cluster answers within this time. A firewall that drops packets never does.
_CONNECT_LIMIT_S = 3.0
#: <net/if.h>
_IFF_UP = 1
_FIRST_POLL_S, _LONGEST_POLL_S, _POLL_GROWTH = 0.02, 1.0, 1.5
#: Python's global generator is reserved for training.
_jitter = random.SystemRandom()


def polls(limit_s: float) -> Iterator[None]:
    """Yield immediately, then at increasing intervals with jitter, until ``limit_s`` has passed."""
    deadline, pause_s = time.monotonic() + limit_s, _FIRST_POLL_S
    yield
    while (left_s := deadline - time.monotonic()) > 0:
        time.sleep(min(left_s, pause_s * _jitter.uniform(0.5, 1.0)))
        pause_s = min(_LONGEST_POLL_S, pause_s * _POLL_GROWTH)
        yield


def listen(environ: Mapping[str, str], num_nodes: int, backlog: int) -> tuple[socket.socket, list[str]]:
    """Return a socket that listens at a port chosen by the kernel, and the host names for other nodes.

    Raises UsageError if this node has no address that others can reach, or lacks the chosen interface.
    """
    check_interfaces(environ, ("GLOO_SOCKET_IFNAME",))
    names = _names(environ) if num_nodes > 1 else []
    for address in _addresses(environ, names) if num_nodes > 1 else [LOOPBACK]:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with suppress(OSError):  # not an address of this node
            listener = socket.create_server((address, 0), family=family, backlog=backlog)
            return listener, list(dict.fromkeys([address, *names]))
    raise UsageError(
        f"MASTER_ADDR: not set, and this node, {socket.gethostname()}, has no address that {num_nodes} nodes "
        "can connect to; set MASTER_ADDR and MASTER_PORT to an address of the first node, or "
        "GLOO_SOCKET_IFNAME to the interface that connects the nodes"
    )


def check_interfaces(environ: Mapping[str, str], variables: Iterable[str]) -> None:
    """Raise UsageError if a variable chooses interfaces that this node does not have or that are down.

    GLOO_SOCKET_IFNAME lists names. NCCL_SOCKET_IFNAME lists prefixes, names after ``=``, or exclusions after
    ``^``.
    """
    here, usable = [name for _, name in socket.if_nameindex()], usable_interfaces()
    node = node_name(environ)
    for variable in variables:
        value = environ.get(variable, "")
        chosen = [name for name in value.lstrip("=").split(",") if name]
        is_prefix = variable.startswith("NCCL") and value[:1] != "="
        if not chosen or value[0] == "^":
            continue
        may_lack_some = variable.startswith("NCCL")
        missing = [
            name for name in chosen if not any(_is_chosen(interface, name, is_prefix) for interface in here)
        ]
        if missing and (len(missing) == len(chosen) or not may_lack_some):
            raise UsageError(
                f"{variable}={value}: {', '.join(missing)} is not an interface of node {node}, which has "
                f"{', '.join(here)}; correct it (network_interface of a profile sets it), or unset it"
            )
        present = [
            interface for interface in here if any(_is_chosen(interface, name, is_prefix) for name in chosen)
        ]
        down = [interface for interface in present if interface not in usable]
        if down and (len(down) == len(present) or not may_lack_some):
            raise UsageError(
                f"{variable}={value}: {', '.join(down)} of node {node} is down or has no IP address; "
                f"{', '.join(usable) or 'no interface'} can be used; correct it (network_interface of a "
                "profile sets it), or unset it"
            )


def check_loopback(environ: Mapping[str, str]) -> None:
    """Raise UsageError if the loopback interface, over which ranks of one node communicate, is down."""
    name = loopback_interface()
    if name not in usable_interfaces():
        raise UsageError(
            f"the loopback interface {name} of node {node_name(environ)} is down or has no IP address, and "
            f"the ranks of a node communicate over it; bring it up (`ip link set {name} up`)"
        )


def _is_chosen(interface: str, name: str, is_prefix: bool) -> bool:
    return interface.startswith(name) if is_prefix else interface == name


def _names(environ: Mapping[str, str]) -> list[str]:
    names = [environ.get("SLURMD_NODENAME", ""), socket.gethostname(), socket.getfqdn()]
    return [name for name in dict.fromkeys(names) if name and not name.startswith("localhost")]


def _addresses(environ: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Return addresses to listen on, best first: the site's interface, Slurm's address, the names', any."""
    interfaces = interface_addresses()
    if chosen := environ.get("GLOO_SOCKET_IFNAME"):
        return [address for name, address in interfaces if name in chosen.split(",")]
    by_slurm = [environ[key] for key in ("SLURM_SRUN_COMM_HOST",) if environ.get(key)]
    by_name = [address for name in names for address in _resolved(name) if not is_loopback(address)]
    on_slurm = "SLURM_PROCID" in environ
    last = [address for _, address in interfaces if not is_loopback(address)] if on_slurm else []
    # A loopback address serves several nodes only if all are on one machine, as in tests; then no node has
    # the machine's name.
    far = [address for address in by_slurm if not is_loopback(address)]
    is_machine = environ.get("SLURMD_NODENAME") in {
        socket.gethostname(),
        socket.gethostname().partition(".")[0],
    }
    return [*far, *by_name, *last, *by_slurm] if is_machine else [*far, *by_name, *by_slurm, *last]


def _resolved(name: str) -> list[str]:
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def reach(hosts: Iterable[str], port: int) -> tuple[str, str] | None:
    """Return the first of ``hosts`` that answers at ``port``, and this node's address towards it."""
    for host in hosts:
        with suppress(OSError), socket.create_connection((host, port), _CONNECT_LIMIT_S) as connection:
            return host, str(connection.getsockname()[0])
    return None


def use_interface_of(address: str) -> None:
    """Make gloo and NCCL use the interface that has ``address``, unless the site chooses one."""
    name = next((name for name, candidate in interface_addresses() if candidate == address), None)
    if name is None and is_loopback(address):
        name = loopback_interface()
    if name is not None:  # otherwise gloo resolves the host name
        use_interface(name)


def use_interface(name: str) -> None:
    """Make gloo and NCCL use the interface, unless the site chooses one.

    NCCL prefers InfiniBand interfaces, which is left unchanged. Otherwise it takes any interface except
    loopback and Docker's, perhaps one of virtual machines or of the baseboard.
    """
    if not os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    is_near = name == loopback_interface()
    has_infiniband = any(interface.startswith("ib") for interface in usable_interfaces())
    if not os.environ.get("NCCL_SOCKET_IFNAME") and (is_near or not has_infiniband):
        os.environ["NCCL_SOCKET_IFNAME"] = f"={name}"


def cant_connect(backend: str, environ: Mapping[str, str]) -> str:
    """Return a message with the interface of ``backend`` ("NCCL" or "gloo") and how to choose another."""
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    name = environ.get(variable, "").lstrip("=")
    which = f"its interface {name}" if name else "the interface that it chose"
    return f"{backend} can't connect over {which}; profile: network_interface ({variable})"


def loopback_interface() -> str:
    """Return the name of the loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else next((name for name in names if name.startswith("lo")), "lo")


def is_loopback(address: str) -> bool:
    """Return True if ``address`` is a loopback address."""
    with suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return False


class _SocketAddress(ctypes.Structure):
    """The common part of sockaddr_in and sockaddr_in6: family, then port and address."""

    _fields_ = [("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26)]


class _Interface(ctypes.Structure):
    """struct ifaddrs of getifaddrs(3)."""


_Interface._fields_ = [
    ("next", ctypes.POINTER(_Interface)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SocketAddress)),
    ("netmask", ctypes.c_void_p),
    ("broadcast", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def interface_addresses() -> list[tuple[str, str]]:
    """Return (interface, address) pairs of this node, IPv4 first, without link-local addresses."""
    pairs = [(name, address) for name, address, _ in _entries() if not address.is_link_local]
    return [(name, str(address)) for name, address in sorted(pairs, key=lambda pair: pair[1].version)]


def usable_interfaces() -> list[str]:
    """Return the names of the interfaces that are up and have an IP address."""
    return list(dict.fromkeys(name for name, _, is_up in _entries() if is_up))


def _entries() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address, bool]]:
    """Return (interface, address, is up) tuples."""
    libc = ctypes.CDLL(None)
    first = ctypes.POINTER(_Interface)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        return []
    entries, entry = [], first
    while entry:
        address = _address_in(entry.contents)
        if address is not None:
            entries.append((entry.contents.name.decode(), address, bool(entry.contents.flags & _IFF_UP)))
        entry = entry.contents.next
    libc.freeifaddrs(first)
    return entries


def _address_in(entry: _Interface) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    if not entry.address:
        return None
    family, data = entry.address.contents.family, bytes(entry.address.contents.data)
    if family == socket.AF_INET:
        return ipaddress.IPv4Address(data[2:6])
    if family == socket.AF_INET6:
        return ipaddress.IPv6Address(data[6:22])
    return None
