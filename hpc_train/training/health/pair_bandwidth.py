"""Measures all-reduces of pairs of nodes: ``python pair_bandwidth.py FOLDER``, one task of srun per node.

``doctor`` copies it to the nodes, so it uses only torch and the standard library. Task r writes
``pair-<r>.json``: its node, the backend, and the GB/s to each other node.
"""

import json
import os
import sys
import time
from datetime import timedelta
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

#: Size of an all-reduce, large enough that latency matters little.
_GPU_BYTES, _CPU_BYTES = 256 * 2**20, 16 * 2**20
_WARM_UP, _REPEATS = 2, 5
#: Maximum number of nodes of which all pairs are measured, else only neighbours. Assumed: 1 s per pair.
_MOST_FOR_ALL = 8
_LIMIT_S = 60.0


def measure(folder: Path) -> None:
    """Join the other tasks, measure the pairs one after the other, and write this task's results."""
    rank, num_nodes = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    nodes = _join(rank, num_nodes, folder, device)
    values = torch.ones((_GPU_BYTES if is_gpu else _CPU_BYTES) // 4, device=device)
    bandwidths = {}
    for pair in _pairs(num_nodes):
        group = dist.new_group(list(pair))
        if rank in pair:
            assert isinstance(group, dist.ProcessGroup)
            seconds = _seconds(values, group, device)
            if rank == pair[0]:
                bandwidths[nodes[pair[1]]] = values.numel() * 4 / seconds / 1e9
        dist.barrier()  # one pair at a time
    result = {"node": nodes[rank], "backend": dist.get_backend(), "pairs": bandwidths}
    (folder / f"pair-{rank}.json").write_text(json.dumps(result), encoding="ascii")


def _join(rank: int, num_nodes: int, folder: Path, device: torch.device) -> list[str]:
    """Form the group of all tasks; return their nodes' names. Task 0 must be on the node that runs srun."""
    host, timeout = os.environ["SLURM_LAUNCH_NODE_IPADDR"], timedelta(seconds=_LIMIT_S)
    if host.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    place = folder / "port"
    if rank == 0:
        store = TCPStore(host, 0, num_nodes, is_master=True, timeout=timeout, wait_for_workers=False)
        place.with_suffix(".new").write_text(str(store.port), encoding="ascii")
        place.with_suffix(".new").rename(place)
    else:
        until = time.monotonic() + _LIMIT_S
        while not place.exists() and time.monotonic() < until:
            time.sleep(0.1)
        port = int(place.read_text(encoding="ascii"))
        store = TCPStore(host, port, num_nodes, is_master=False, timeout=timeout)
    backend = os.environ.get("HPC_TRAIN_TEST_CUDA_BACKEND", "nccl") if device.type == "cuda" else "gloo"
    device_id = device if backend == "nccl" else None
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=num_nodes, timeout=timeout, device_id=device_id
    )
    store.set(f"node-{rank}", os.environ.get("SLURMD_NODENAME", f"task {rank}"))
    return [store.get(f"node-{number}").decode() for number in range(num_nodes)]


def _pairs(num_nodes: int) -> list[tuple[int, int]]:
    if num_nodes <= _MOST_FOR_ALL:
        return list(combinations(range(num_nodes), 2))
    return [(number, (number + 1) % num_nodes) for number in range(num_nodes)]


def _seconds(values: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the shortest time of several all-reduces, in seconds."""
    seconds = []
    for _ in range(_WARM_UP + _REPEATS):
        began = time.perf_counter()
        dist.all_reduce(values, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # destroying the groups may hang
