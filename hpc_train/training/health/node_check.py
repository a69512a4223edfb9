"""Node check of every rank before an attempt's first step: memory, arithmetic, network and disk.

Called by ``training.rank`` before the model is built. Without it these faults would appear later, as
slowness, or not at all.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.errors import (
    BadNodeError,
    HpcTrainError,
    PeerLostError,
    StorageError,
    TransientStorageError,
    listed,
)
from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.data_facts.by_name import prefetched_bytes
from hpc_train.experiment.topology.degrees import Ranks, find_degrees
from hpc_train.paths import AttemptPaths
from hpc_train.rank.env import RankFacts
from hpc_train.run.files import sync_file
from hpc_train.run.storage_errors import FULL, TRANSIENT, error_words, storage_error
from hpc_train.training.distributed import affinity, shared_flags

_SIZE = 256
#: Few, because many short checks over many attempts detect an intermittent fault as well as a long one.
_REPEATS = 3
_DISK_BYTES = 64 * 1024
#: Assumed: minimum free memory for training.
_LEAST_MEMORY = 256 * 2**20
#: Assumed: a device that is shared on purpose is never filled to this fraction before the start.
_MOST_BY_OTHERS = 0.5
#: Assumed: time for a driver to free the memory of a killed process.
_FREED_AFTER_S = 30.0
_PAUSE_S = 1.0
#: Size of the timed product in bf16 (137 GFLOP). Assumed: a rank is slow from this factor on.
_TIMED_SIZE, _SLOW_FACTOR = 4096, 1.3
_MOST_NAMED = 16
_log = logging.getLogger(__name__)
#: Timeout of nvidia-smi and of dmesg.
_DRIVER_LIMIT_S = 10.0
#: The forms in which drivers print a flag that is set.
_YES = {"1", "Yes"}
#: Maximum number of lines of the kernel's log in a message.
_MOST_XID_LINES = 3


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
    """Check this rank's node. Collective over ``group``, or else the default group.

    ``connect`` is called before the device's first collective, once all ranks are ready. ``owns_gpu``: a
    scheduler allocated the GPU exclusively to this run, so that memory used by others is a fault.

    Raises BadNodeError on the rank whose node fails, PeerLostError on the others; StorageError if the disk is
    full, which is not the node's fault. A rank whose check fails still takes part in the exchange.
    """
    failure = _local_failure(facts, device, attempt, node, experiment, owns_gpu)
    _agree(failure, facts, group)
    connect()
    problem = _reduction_failure(facts, device, group)
    description = f"an all-reduce over {facts.world_size} ranks: {problem}"
    _agree(BadNodeError(_failed(node, description)) if problem else None, facts, group)
    if device.type == "cuda":
        _name_slow_ranks(_product_seconds(device), facts, node, group)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)  # of training, from here on


def _local_failure(
    facts: RankFacts,
    device: torch.device,
    attempt: AttemptPaths,
    node: str,
    experiment: Experiment | None,
    owns_gpu: bool,
) -> HpcTrainError | None:
    """Return the error of this rank's part of the node, if any."""
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
        except Exception as error:  # any error of a broken driver
            return BadNodeError(_failed(node, f"{name}: {error}"))
    return None


def _failed(node: str, description: str) -> str:
    remedy = "use another node, or write recovery.check_nodes: false to train on it nevertheless"
    return f"node {node} failed its check of {description}; {remedy}"


def _check_memory(
    facts: RankFacts, device: torch.device, experiment: Experiment | None, owns_gpu: bool
) -> None:
    slurm = None if experiment is None else experiment.slurm
    is_shared = owns_gpu and slurm is not None and slurm.runs_per_gpu > 1  # others are expected there
    if device.type == "cuda" and not is_shared:
        _check_gpu_memory(facts, device, experiment, owns_gpu)
    available = _available_memory()
    if available is not None and available < _LEAST_MEMORY:
        raise HpcTrainError(f"only {available / 2**20:.0f} MiB of the node's memory are free")


def _check_gpu_memory(
    facts: RankFacts, device: torch.device, experiment: Experiment | None, owns_gpu: bool
) -> None:
    """Raise if others fill a GPU that this run owns, or leave too little; else warn."""
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
    text = f"{taken} are used by other processes{_holders(device)}"
    if owns_gpu:
        raise HpcTrainError(text)
    if needed := _needed_beyond(free, experiment, facts):
        raise HpcTrainError(f"{text}, and {needed}")
    _log.warning("%s; %.1f GiB are free", text, free / 2**30)


def _needed_beyond(free: int, experiment: Experiment | None, facts: RankFacts) -> str | None:
    """Return the predicted memory of a step if it exceeds ``free`` bytes of a GPU; else None."""
    from hpc_train.experiment.plan.devices import Device  # imported here, because a filled GPU is rare
    from hpc_train.experiment.plan.planning import PlannedRun
    from hpc_train.experiment.plan.prediction import predict

    if experiment is None:
        return None
    ranks = Ranks(facts.world_size, facts.local_world_size)
    degrees = find_degrees(experiment.parallel, facts.world_size, facts.local_world_size)
    if isinstance(degrees, Problem):
        return None
    run = PlannedRun("", {}, experiment, ranks, degrees, None, None, None)
    (prediction,) = predict([run], lambda _: Device("GPU", is_gpu=True, memory_bytes=free))
    return f"a step takes {prediction.peak_memory_gb:.1f} GB" if prediction.fits is False else None


def _holders(device: torch.device) -> str:
    """Return nvidia-smi's list of processes that use memory of ``device``; empty if unknown."""
    query = "--query-compute-apps=pid,process_name,used_memory"
    listed = smi(f"--id={_uuid(device)}", query, "--format=csv,noheader")
    lines = [f"process {line}" for line in listed.splitlines() if line.strip()]
    return f" ({'; '.join(lines)})" if lines else ""


def _uuid(device: torch.device) -> str:
    return f"GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', '')}"


def _check_gpu(device: torch.device) -> None:
    """Raise if the driver reports the GPU as broken; warn of problems that may be temporary."""
    if device.type != "cuda":
        return
    state = read_state(_uuid(device))
    if state.fault:
        raise HpcTrainError(state.fault)
    address = affinity.pci_id(device.index or 0).removesuffix(".0")
    for warning in [*state.warnings, *xid_lines(address)]:
        _log.warning("%s: %s", device, warning)


def _product_seconds(device: torch.device) -> float:
    """Return the device's shortest time, in seconds, for a large product in bf16."""
    seconds = []
    with suppress(torch.OutOfMemoryError):  # a shared GPU
        ones = torch.ones(_TIMED_SIZE, _TIMED_SIZE, dtype=torch.bfloat16, device=device)
        for _ in range(_REPEATS + 2):  # the first two load kernels and raise the clocks
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            torch.mm(ones, ones)
            torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
    return min(seconds, default=0.0)


def _name_slow_ranks(seconds: float, facts: RankFacts, node: str, group: dist.ProcessGroup | None) -> None:
    """Log the ranks that compute slower than the median. Collective. Not a failure: one measurement."""
    times = torch.zeros(facts.world_size, dtype=torch.float64)
    times[facts.rank] = seconds
    dist.all_reduce(times, group=group)
    median = statistics.median(times.tolist())
    slow = [rank for rank, time_s in enumerate(times.tolist()) if time_s > _SLOW_FACTOR * median]
    if facts.rank in slow:
        message = "node %s: a product takes %.2f times as long on rank %d as on the median rank"
        _log.warning(message, node, seconds / median, facts.rank)
    elif facts.rank == 0 and slow:
        named = listed([str(rank) for rank in slow], _MOST_NAMED)
        _log.warning("slower than the median of all ranks: rank %s; see their logs", named)


def _available_memory() -> int | None:
    """Return the bytes of this node's memory that are available without swapping; None if unknown."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _check_arithmetic(device: torch.device) -> None:
    """Multiply matrices of small integers, whose product float32 and tf32 represent exactly."""
    for repeat in range(_REPEATS):
        a, b, c, d = (_pattern(3 * repeat + k, device) for k in (1, 2, 3, 4))
        product = torch.matmul(torch.outer(a, b), torch.outer(c, d))
        expected = torch.dot(b.cpu(), c.cpu()).item() * torch.outer(a.cpu(), d.cpu())
        wrong = int((product.cpu() != expected).sum())
        if wrong:
            raise HpcTrainError(f"{wrong} of {expected.numel()} numbers are wrong")


def _pattern(seed: int, device: torch.device) -> Tensor:
    """Return numbers from −3 to 3 without a random generator, which is reserved for training."""
    index = torch.arange(_SIZE, device=device)
    return ((index * (2 * seed + 1) + index // 7) % 7 - 3).to(torch.float32)


def _check_shared_memory(experiment: Experiment, ranks: int) -> None:
    """Raise if loader processes can't start; warn if /dev/shm is too small for prefetched batches."""
    if reason := shared_flags.shm_refusal():
        raise HpcTrainError(
            f"{reason}; loader processes need it: write data.workers: 0 to train without them"
        )
    needed, size = prefetched_bytes(experiment, ranks), shared_flags.shm_bytes()
    if needed is not None and size is not None and needed > size:
        _log.warning(
            "%s has %.0f MiB, and the loader processes of this node read %.0f MiB ahead: batches that do not "
            "fit go through a pipe, which takes longer; have it mounted larger, or write fewer data.workers",
            shared_flags.SHM,
            size / 2**20,
            needed / 2**20,
        )


def _check_disk(folder: Path, node: str) -> None:
    """Write a small file to the disk, read it back from the disk, and remove it."""
    path = folder / f".node-check-{node}"
    content = secrets.token_bytes(_DISK_BYTES)
    try:
        read_back = _through_the_disk(path, content)
    except OSError as error:
        if error.errno in FULL | TRANSIENT:  # all nodes share the disk: not this node's fault
            raise storage_error(error, folder) from error
        raise HpcTrainError(error_words(error, path)) from error
    finally:
        with suppress(OSError):
            path.unlink()
    if read_back != content:
        raise HpcTrainError(f"{path} contains other bytes than were written")


def _through_the_disk(path: Path, content: bytes) -> bytes:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, content)
        sync_file(descriptor)
        with suppress(OSError):  # some file systems refuse advice
            # Otherwise the read would come from the page cache.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return os.pread(descriptor, len(content) + 1, 0)
    finally:
        os.close(descriptor)


def _reduction_failure(facts: RankFacts, device: torch.device, group: dist.ProcessGroup | None) -> str | None:
    """Return the problem of a sum over all ranks on the device; None if it is correct."""
    numbers = torch.arange(_SIZE, dtype=torch.float64, device=device) * (facts.rank + 1)
    dist.all_reduce(numbers, group=group)
    ranks = facts.world_size * (facts.world_size + 1) // 2
    wrong = int((numbers.cpu() != torch.arange(_SIZE, dtype=torch.float64) * ranks).sum())
    return f"{wrong} of {_SIZE} sums are wrong" if wrong else None


def _agree(failure: HpcTrainError | None, facts: RankFacts, group: dist.ProcessGroup | None) -> None:
    """Raise this rank's error, or PeerLostError if another failed. Collective, on the CPU."""
    failed = torch.zeros(facts.world_size, dtype=torch.int32)
    failed[facts.rank] = failure is not None
    dist.all_reduce(failed, group=group)
    if failure is not None:
        raise failure
    if failed.any():
        named = ", ".join(str(rank) for rank in failed.nonzero().flatten().tolist())
        raise PeerLostError(f"the node of rank {named} failed its check; see rank-<r>.error of the attempt")


@dataclass(frozen=True)
class GpuState:
    """One GPU's counters."""

    #: Uncorrectable memory errors since the driver was loaded.
    ecc_errors: int = 0
    #: A row of memory will be replaced at the next reset of the GPU; no spare row was left.
    remap_pending: bool = False
    remap_failed: bool = False
    is_slowed: bool = False
    links_up: int = 0
    links_down: int = 0

    @property
    def fault(self) -> str | None:
        """The fault that excludes the node, if any; only a reset or a repair removes it."""
        if self.remap_failed:
            return "a broken row of its memory could not be replaced; the GPU must be repaired"
        return "a broken row of its memory waits for a reset of the GPU" if self.remap_pending else None

    @property
    def warnings(self) -> list[str]:
        """Problems that may be temporary or have no effect on this run."""
        faults = []
        if self.ecc_errors:
            faults.append(f"{self.ecc_errors} uncorrectable ECC errors since its driver was loaded")
        if self.is_slowed:
            faults.append("its hardware slows its clocks down: temperature or power")
        if self.links_up and self.links_down:
            faults.append(f"{self.links_down} of its {self.links_up + self.links_down} NVLinks are inactive")
        return faults


def read_state(uuid: str) -> GpuState:
    """Return the state of the GPU with this UUID (``GPU-8f…``)."""
    ecc = "ecc.errors.uncorrected.volatile.total"
    errors, slowed = _row(uuid, "gpu", ecc, "clocks_throttle_reasons.hw_slowdown")
    pending, failed = _row(uuid, "remapped-rows", "remapped_rows.pending", "remapped_rows.failure")
    links = smi("nvlink", "--status", "-i", uuid)
    return GpuState(
        ecc_errors=int(errors) if errors.isdecimal() else 0,
        remap_pending=pending in _YES,
        remap_failed=failed in _YES,
        is_slowed=slowed == "Active",
        links_up=len(re.findall(r"Link \d+: [\d.]+ GB/s", links)),
        links_down=len(re.findall(r"Link \d+: <inactive>", links)),
    )


def smi(*arguments: str) -> str:
    """Return the output of nvidia-smi; empty if it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_LIMIT_S, check=True)
        return done.stdout
    return ""


def xid_lines(address: str) -> list[str]:
    """Return the last errors of the GPU at this PCI address in the kernel's log; empty if unreadable."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=_DRIVER_LIMIT_S, check=True)
        lines = [line for line in done.stdout.splitlines() if f"NVRM: Xid (PCI:{address}" in line]
        return lines[-_MOST_XID_LINES:]
    return []


def _row(uuid: str, query: str, *columns: str) -> list[str]:
    output = smi(f"--id={uuid}", f"--query-{query}={','.join(columns)}", "--format=csv,noheader")
    values = [value.strip() for value in output.strip().split(",")]
    return values if len(values) == len(columns) else [""] * len(columns)
