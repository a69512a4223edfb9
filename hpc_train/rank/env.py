"""The rank of a process, read from its environment, and the GPUs that it may use.

Imports no torch: launchers and commands use it too.
"""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from hpc_train.errors import UsageError

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SLURM = (
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NNODES",
    "SLURM_TASKS_PER_NODE",
)
#: Set by a launcher if OMP_NUM_THREADS is a rank's share of the cores rather than the user's choice.
THREADS_BY_SHARE = "HPC_TRAIN_THREADS_BY_SHARE"
_GPU_NAME = re.compile(r"\d+|GPU-.+|MIG-.+")
_TASKS_PER_NODE = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class RankFacts:
    """The position of a process among all ranks of an attempt."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    num_nodes: int = 1

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> RankFacts:
        """Read torchrun's variables, else those of ``srun``; without either this is the only rank.

        Raises UsageError if variables contradict each other or only some of them are set.
        """
        if any(name in environ for name in _TORCHRUN):
            return cls._from_torchrun(environ)
        if is_started_by_slurm(environ):
            return cls._from_slurm(environ)
        return cls()

    @classmethod
    def _from_torchrun(cls, environ: Mapping[str, str]) -> RankFacts:
        _check_complete(environ, _TORCHRUN)
        rank, world_size, local_rank, local_world_size = (_number(environ, name) for name in _TORCHRUN)
        _check_below("RANK", rank, "WORLD_SIZE", world_size)
        _check_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
        if local_world_size > world_size:
            raise UsageError(
                f"LOCAL_WORLD_SIZE: {local_world_size} is more than WORLD_SIZE {world_size}; "
                "set it to the ranks of this node"
            )
        node, num_nodes = rank // local_world_size, -(-world_size // local_world_size)
        if "GROUP_RANK" in environ:
            node = _number(environ, "GROUP_RANK")
        if "GROUP_WORLD_SIZE" in environ:
            num_nodes = _number(environ, "GROUP_WORLD_SIZE")
        _check_below("GROUP_RANK", node, "the number of nodes", num_nodes)
        return cls(rank, world_size, local_rank, local_world_size, node, num_nodes)

    @classmethod
    def _from_slurm(cls, environ: Mapping[str, str]) -> RankFacts:
        _check_complete(environ, _SLURM)
        rank, world_size, local_rank, node, num_nodes = (_number(environ, name) for name in _SLURM[:5])
        tasks = parse_tasks_per_node(environ["SLURM_TASKS_PER_NODE"])
        if len(tasks) != num_nodes or sum(tasks) != world_size:
            raise UsageError(
                f"SLURM_TASKS_PER_NODE: {environ['SLURM_TASKS_PER_NODE']} is {sum(tasks)} tasks on "
                f"{len(tasks)} nodes, but SLURM_NTASKS is {world_size} and SLURM_NNODES {num_nodes}; "
                "start ranks with srun"
            )
        _check_below("SLURM_PROCID", rank, "SLURM_NTASKS", world_size)
        _check_below("SLURM_NODEID", node, "SLURM_NNODES", num_nodes)
        _check_below("SLURM_LOCALID", local_rank, "the tasks of this node", tasks[node])
        return cls(rank, world_size, local_rank, tasks[node], node, num_nodes)


def is_started_by_slurm(environ: Mapping[str, str]) -> bool:
    """Return True if this process is a task of ``srun``."""
    return "SLURM_PROCID" in environ and not any(name in environ for name in _TORCHRUN)


def visible_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """Return the names in CUDA_VISIBLE_DEVICES, like CUDA up to the first invalid name; None if not set."""
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return None
    names = [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",")]
    return list(takewhile(_GPU_NAME.fullmatch, names))


def node_name(environ: Mapping[str, str]) -> str:
    """Return Slurm's name of this node, else its host name."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def parse_tasks_per_node(text: str) -> list[int]:
    """Parse the tasks of each node from Slurm's compact form: ``2(x3),1`` is [2, 2, 2, 1]."""
    tasks: list[int] = []
    for part in text.split(","):
        match = _TASKS_PER_NODE.fullmatch(part)
        if match is None:
            raise UsageError(
                f"SLURM_TASKS_PER_NODE: {text!r} is not of the form 2(x3),1; start ranks with srun"
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _check_complete(environ: Mapping[str, str], names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in environ]
    if missing:
        present = ", ".join(name for name in names if name in environ)
        raise UsageError(
            f"{missing[0]}: not set, while {present} is; set all of {', '.join(names)}, "
            "or none to run a single rank"
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name}: {text!r} is not a non-negative integer; set it or unset the whole group")
    return int(text)


def _check_below(name: str, value: int, bound_name: str, bound: int) -> None:
    if value >= bound:
        raise UsageError(
            f"{name}: {value} is not below {bound_name} ({bound}); one of the two is stale or wrong"
        )


_DEVICES = Path("/dev")
_DEVICE_FILE = re.compile(r"nvidia\d+")
_UUID = re.compile(r"\(UUID: ([^)]+)\)")
#: Assumed: the driver may take seconds to initialize if no process uses it.
_SMI_LIMIT_S = 30.0


def count_gpus(environ: Mapping[str, str]) -> int:
    """Return how many GPUs, or MIG devices, processes of this machine can use."""
    return len(gpu_names(environ))


def gpu_names(environ: Mapping[str, str]) -> list[str]:
    """Return the GPU names that CUDA_VISIBLE_DEVICES lists, else the driver's."""
    if (names := visible_gpus(environ)) is not None:
        return names
    if (from_driver := _names_by_driver()) is not None:
        return from_driver
    files = [path for path in _DEVICES.iterdir() if _DEVICE_FILE.fullmatch(path.name)]
    return [str(number) for number in range(len(files))]


def mig_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable from which each rank reads its MIG device; empty if there are none."""
    names = gpu_names(environ)
    has_mig = any(name.startswith("MIG-") for name in names)
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)} if has_mig else {}


def _names_by_driver() -> list[str] | None:
    """Return numbers, or the UUIDs of MIG devices and of GPUs without such: None if nvidia-smi fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_SMI_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    gpus = [_UUID.findall(part) for part in re.split(r"^GPU ", done.stdout, flags=re.MULTILINE)[1:]]
    if all(len(uuids) < 2 for uuids in gpus):
        return [str(number) for number in range(len(gpus))]
    return [uuid for uuids in gpus for uuid in (uuids[1:] or uuids)]
