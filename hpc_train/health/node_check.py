"""Every rank checks its node before an attempt's first step: memory, arithmetic, network, and the disk.

Called by ``training.rank`` before anything is built. A failure here would otherwise appear later, slower, or
not at all.
"""

from __future__ import annotations

import logging
import os
import secrets
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.config.problems import Problem
from hpc_train.config.schema import Experiment
from hpc_train.data_facts.loader_memory import prefetched_bytes
from hpc_train.distributed import affinity, shared_memory
from hpc_train.distributed.env import RankFacts
from hpc_train.errors import (
    BadNodeError,
    HpcTrainError,
    PeerLostError,
    StorageError,
    TransientStorageError,
    listed,
)
from hpc_train.health import gpu_state
from hpc_train.paths import AttemptPaths
from hpc_train.run.files import sync_file
from hpc_train.run.storage_errors import FULL, TRANSIENT, error_words, storage_error
from hpc_train.topology.degrees import Ranks, find_degrees

_SIZE = 256
#: Few: an occasionally faulty device is found by many checks of many attempts, not by a long one.
_REPEATS = 3
_DISK_BYTES = 64 * 1024
#: Assumed: with less free memory than this nothing can be trained.
_LEAST_MEMORY = 256 * 2**20
#: Assumed: a device that is shared on purpose is never filled to this fraction before we start.
_MOST_BY_OTHERS = 0.5
#: Assumed: how long a driver may take to free the memory of a process that was killed.
_FREED_AFTER_S = 30.0
_PAUSE_S = 1.0
#: Of the product that is timed, in bf16: 137 GFLOP. Assumed: a rank is slow from this factor on.
_TIMED_SIZE, _SLOW_FACTOR = 4096, 1.3
_MOST_NAMED = 16
_log = logging.getLogger(__name__)


def check(
    facts: RankFacts,
    device: torch.device,
    attempt: AttemptPaths,
    node: str,
    group: dist.ProcessGroup | None = None,
    experiment: Experiment | None = None,
    connect: Callable[[], None] = lambda: None,
    *,
    owns_gpu: bool = True,
) -> None:
    """Check this rank's node. Collective: every rank calls it, over ``group`` or else the default one.

    ``connect`` is called before the device's first collective, once all ranks are ready for it. ``owns_gpu``:
    a scheduler gave it to this run alone, so that memory that others use is a fault.

    Raises BadNodeError on the rank whose node fails, PeerLostError on the others; StorageError if the disk is
    full, which is not the node's fault. A rank that fails its own part still takes part in the exchange.
    """
    own = _own_failure(facts, device, attempt, node, experiment, owns_gpu)
    _agree(own, facts, group)
    connect()
    wrong = _reduction_failure(facts, device, group)
    failed = f"an all-reduce over {facts.world_size} ranks: {wrong}"
    _agree(BadNodeError(_failed(node, failed)) if wrong else None, facts, group)
    if device.type == "cuda":
        _name_slow_ranks(_product_seconds(device), facts, node, group)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)  # of training, from here on


def _own_failure(
    facts: RankFacts,
    device: torch.device,
    attempt: AttemptPaths,
    node: str,
    experiment: Experiment | None,
    owns_gpu: bool,
) -> HpcTrainError | None:
    """Return what is wrong with this rank's part of the node."""
    parts: list[tuple[str, Callable[[], None]]] = [
        ("memory", lambda: _check_memory(facts, device, experiment, owns_gpu)),
        (f"the state of {device}", lambda: _check_gpu(device)),
        (f"a product of matrices on {device}", lambda: _check_arithmetic(device)),
    ]
    if facts.local_rank == 0:
        parts.append(("the disk", lambda: _check_disk(attempt.folder, node)))
        if experiment is not None and experiment.workers > 0:
            parts.append(("shared memory", lambda: _check_shared_memory(experiment, facts.local_world_size)))
    for name, part in parts:
        try:
            part()
        except (StorageError, TransientStorageError) as error:
            return error
        except OSError as error:
            return BadNodeError(_failed(node, f"{name}: {error_words(error)}"))
        except Exception as error:  # whatever a broken driver reports
            return BadNodeError(_failed(node, f"{name}: {error}"))
    return None


def _failed(node: str, what: str) -> str:
    remedy = "use another node, or write recovery.check_nodes: false to train on it nevertheless"
    return f"node {node} failed its check of {what}; {remedy}"


def _check_memory(
    facts: RankFacts, device: torch.device, experiment: Experiment | None, owns_gpu: bool
) -> None:
    if device.type == "cuda":
        _check_gpu_memory(facts, device, experiment, owns_gpu)
    available = _available_memory()
    if available is not None and available < _LEAST_MEMORY:
        raise HpcTrainError(f"only {available / 2**20:.0f} MiB of the node's memory are free")


def _check_gpu_memory(
    facts: RankFacts, device: torch.device, experiment: Experiment | None, owns_gpu: bool
) -> None:
    """Raise if others fill a GPU that is this run's alone, or leave too little; else warn."""
    until = time.monotonic() + (_FREED_AFTER_S if owns_gpu else 0.0)
    while True:
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        if others <= _MOST_BY_OTHERS * total:
            return
        if time.monotonic() >= until:
            break
        time.sleep(_PAUSE_S)
    taken = f"{others / 2**30:.1f} of {total / 2**30:.1f} GiB of {device}"
    words = f"{taken} are used by other processes{_holders(device)}"
    if owns_gpu:
        raise HpcTrainError(words)
    if needed := _needed_beyond(free, experiment, facts):
        raise HpcTrainError(f"{words}, and {needed}")
    _log.warning("%s; %.1f GiB are free", words, free / 2**30)


def _needed_beyond(free: int, experiment: Experiment | None, facts: RankFacts) -> str | None:
    """Return the predicted memory of a step if it exceeds ``free`` bytes of a GPU; else None."""
    from hpc_train.plan.devices import Device  # here alone: a start on a filled GPU is rare
    from hpc_train.plan.planning import PlannedRun
    from hpc_train.plan.prediction import predict

    if experiment is None:
        return None
    ranks = Ranks(facts.world_size, facts.local_world_size)
    degrees = find_degrees(experiment.parallel, facts.world_size, facts.local_world_size)
    if isinstance(degrees, Problem):
        return None
    run = PlannedRun("", {}, experiment, ranks, degrees, None, None, None)
    (found,) = predict([run], lambda _: Device("GPU", is_gpu=True, memory_bytes=free))
    return f"a step takes {found.peak_memory_gb:.1f} GB" if found.fits is False else None


def _holders(device: torch.device) -> str:
    """Return which processes use memory of ``device``, as nvidia-smi lists them; empty if unknown."""
    query = "--query-compute-apps=pid,process_name,used_memory"
    listed = gpu_state.smi(f"--id={_uuid(device)}", query, "--format=csv,noheader")
    lines = [f"process {line}" for line in listed.splitlines() if line.strip()]
    return f" ({'; '.join(lines)})" if lines else ""


def _uuid(device: torch.device) -> str:
    return f"GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', '')}"


def _check_gpu(device: torch.device) -> None:
    """Raise if the driver counts the GPU as broken; warn of what may be momentary."""
    if device.type != "cuda":
        return
    state = gpu_state.read_state(_uuid(device))
    if state.fault:
        raise HpcTrainError(state.fault)
    address = affinity.pci_id(device.index or 0).removesuffix(".0")
    for words in [*state.warnings, *gpu_state.xid_lines(address)]:
        _log.warning("%s: %s", device, words)


def _product_seconds(device: torch.device) -> float:
    """Return how long the device takes for a large product in bf16, the shortest of a few."""
    seconds = []
    with suppress(torch.OutOfMemoryError):  # a shared GPU
        ones = torch.ones(_TIMED_SIZE, _TIMED_SIZE, dtype=torch.bfloat16, device=device)
        for _ in range(_REPEATS + 2):  # the first ones load kernels and raise the clocks
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            torch.mm(ones, ones)
            torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
    return min(seconds, default=0.0)


def _name_slow_ranks(seconds: float, facts: RankFacts, node: str, group: dist.ProcessGroup | None) -> None:
    """Log which ranks compute slower than the median of all. Collective.

    Never a failure: one measurement may be disturbed.
    """
    times = torch.zeros(facts.world_size, dtype=torch.float64)
    times[facts.rank] = seconds
    dist.all_reduce(times, group=group)
    median = statistics.median(times.tolist())
    slow = [rank for rank, time_s in enumerate(times.tolist()) if time_s > _SLOW_FACTOR * median]
    if facts.rank in slow:
        words = "node %s: a product takes %.2f times as long on rank %d as on the median rank"
        _log.warning(words, node, seconds / median, facts.rank)
    elif facts.rank == 0 and slow:
        named = listed([str(rank) for rank in slow], _MOST_NAMED)
        _log.warning("slower than the median of all ranks: rank %s; see their logs", named)


def _available_memory() -> int | None:
    """Return the bytes of this node's memory that are available without swapping, None if unknown."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _check_arithmetic(device: torch.device) -> None:
    """Multiply matrices of small integers: float32 represents the product exactly, and so does tf32."""
    for repeat in range(_REPEATS):
        a, b, c, d = (_pattern(3 * repeat + k, device) for k in (1, 2, 3, 4))
        product = torch.matmul(torch.outer(a, b), torch.outer(c, d))
        expected = torch.dot(b.cpu(), c.cpu()).item() * torch.outer(a.cpu(), d.cpu())
        wrong = int((product.cpu() != expected).sum())
        if wrong:
            raise HpcTrainError(f"{wrong} of {expected.numel()} numbers are wrong")


def _pattern(seed: int, device: torch.device) -> Tensor:
    """Return numbers of −3…3 without using a random generator, which belongs to training."""
    index = torch.arange(_SIZE, device=device)
    return ((index * (2 * seed + 1) + index // 7) % 7 - 3).to(torch.float32)


def _check_shared_memory(experiment: Experiment, ranks: int) -> None:
    """Raise if loader processes can't start; warn if /dev/shm is too small for what they read ahead."""
    if reason := shared_memory.refusal():
        raise HpcTrainError(
            f"{reason}; loader processes need it: write data.workers: 0 to train without them"
        )
    needed, size = prefetched_bytes(experiment, ranks), shared_memory.total_bytes()
    if needed is not None and size is not None and needed > size:
        _log.warning(
            "%s has %.0f MiB, and the loader processes of this node read %.0f MiB ahead: batches that do not "
            "fit go through a pipe, which takes longer; have it mounted larger, or write fewer data.workers",
            shared_memory.FOLDER,
            size / 2**20,
            needed / 2**20,
        )


def _check_disk(folder: Path, node: str) -> None:
    """Write a small file to the disk, read it back from there, remove it."""
    path = folder / f".node-check-{node}"
    content = secrets.token_bytes(_DISK_BYTES)
    try:
        found = _through_the_disk(path, content)
    except OSError as error:
        if error.errno in FULL | TRANSIENT:  # a disk that all nodes share: not this node's fault
            raise storage_error(error, folder) from error
        raise HpcTrainError(error_words(error, path)) from error
    finally:
        with suppress(OSError):
            path.unlink()
    if found != content:
        raise HpcTrainError(f"{path} contains other bytes than were written")


def _through_the_disk(path: Path, content: bytes) -> bytes:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, content)
        sync_file(descriptor)
        with suppress(OSError):  # some file systems refuse advice
            # Otherwise the page cache answers for the disk.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return os.pread(descriptor, len(content) + 1, 0)
    finally:
        os.close(descriptor)


def _reduction_failure(facts: RankFacts, device: torch.device, group: dist.ProcessGroup | None) -> str | None:
    """Return what is wrong with a sum over all ranks, on the device."""
    numbers = torch.arange(_SIZE, dtype=torch.float64, device=device) * (facts.rank + 1)
    dist.all_reduce(numbers, group=group)
    ranks = facts.world_size * (facts.world_size + 1) // 2
    wrong = int((numbers.cpu() != torch.arange(_SIZE, dtype=torch.float64) * ranks).sum())
    return f"{wrong} of {_SIZE} sums are wrong" if wrong else None


def _agree(own: HpcTrainError | None, facts: RankFacts, group: dist.ProcessGroup | None) -> None:
    """Raise if any rank failed: its error there, PeerLostError elsewhere.

    Over the CPU, since a device may be broken.
    """
    failed = torch.zeros(facts.world_size, dtype=torch.int32)
    failed[facts.rank] = own is not None
    dist.all_reduce(failed, group=group)
    if own is not None:
        raise own
    if failed.any():
        named = ", ".join(str(rank) for rank in failed.nonzero().flatten().tolist())
        raise PeerLostError(f"the node of rank {named} failed its check; see rank-<r>.error of the attempt")
