"""``micro_batch_size: auto``: finds by trial the largest size that fits on all ranks; stored in the run.

Each rank starts a trial process (``training.batch_size_trial``). The trials form their own process group and
train whole steps, smallest size first, until one of them runs out of memory. Only trials can then hang in a
collective; they are killed, and the run itself starts as if nothing had been tried.

Legend: G global batch, m micro-batch, R data-parallel ranks.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hpc_train.checkpoint.control_group import ControlGroup
from hpc_train.config.problems import Problem
from hpc_train.distributed import signals
from hpc_train.distributed.env import is_started_by_slurm
from hpc_train.errors import BadFileError, ExitCode, HpcTrainError, PeerLostError
from hpc_train.run.found_micro_batch import Found, keep, kept
from hpc_train.topology.batch_arithmetic import too_few_micro_batches
from hpc_train.topology.degrees import find_degrees
from hpc_train.topology.micro_batch_sizes import scheduled_candidates
from hpc_train.training.rank import Rank
from hpc_train.validate.compatibility import auto_on_cpu
from hpc_train.validate.slurm_rules import max_nodes, ranks_on_each_node

_KEY = "optimization.micro_batch_size"
_TRIAL_MODULE = "hpc_train.training.batch_size_trial"
#: Interval between polls of the trials (assumed); a step of most models takes longer.
_POLL_S = 0.1
#: Outcomes that a trial sends last, unless it dies. ``peer``: another trial is gone; this one did not fail.
DONE, OUT_OF_MEMORY, FAILED, PEER = "done", "out of memory", "failed", "peer"
#: Precedence of the outcomes if ranks differ: other trials fail because one ran out of memory.
_WEIGHT = {OUT_OF_MEMORY: 2, FAILED: 1}
_log = logging.getLogger(__name__)


class TrialError(HpcTrainError):
    """A trial failed for a reason other than memory; the text is the trial's error."""


def resolved(rank: Rank) -> Rank:
    """Return the rank with ``auto`` replaced by a number. Collective.

    Raises BadFileError if the ranks have no GPUs, nothing fits, the model has BatchNorm, or there are more
    ranks now than micro-batches of the run's size. Errors of a trial's step are raised here.
    """
    if rank.experiment.optimization.micro_batch_size != "auto":
        return rank
    control = ControlGroup(rank.facts.rank, rank.facts.world_size, rank.group.control)
    # Rank 0 decides: on a network disk the others may not see the file yet.
    first = control.together(lambda: kept(rank.paths) if rank.is_first else None)
    (size,) = control.broadcast([0 if first is None else first.size])
    if size == 0:
        found = _search(rank, control)
        first = control.together(lambda: keep(rank.paths, found) if rank.is_first else None)
        (size,) = control.broadcast([found.size if first is None else first.size])
    _check_ranks(rank, size)
    if rank.is_first:
        _log.info("%s: auto is %d in this run", _KEY, size)
    return replace(rank, experiment=rank.experiment.with_micro_batch_size(size))


def doubling(sizes: Sequence[int]) -> list[int]:
    """Return a subset from the smallest to the largest size, each at least twice the previous one."""
    chosen: list[int] = []
    for size in reversed(sizes):
        if not chosen or 2 * size <= chosen[-1]:
            chosen.append(size)
    return sorted({*chosen, *sizes[:1]})


def _check_ranks(rank: Rank, size: int) -> None:
    micro_batches, degrees = rank.experiment.optimization.global_batch_size // size, rank.degrees
    each = degrees.pipeline * degrees.tensor
    if problem := too_few_micro_batches(micro_batches, degrees.data_ranks, each, found=size):
        raise problem.as_error()


def _search(rank: Rank, control: ControlGroup) -> Found:
    """Return the largest size that fits on all ranks. Collective."""
    if rank.device.type != "cuda":
        raise auto_on_cpu().as_error()
    sizes = _candidates(rank)
    fitted, too_large, left = 0, None, doubling(sizes)
    while left:
        tried = _try(rank, control, left)
        fitted = left[tried.num_fitted - 1] if tried.num_fitted else fitted
        if tried.reason is not None:
            too_large = left[tried.num_fitted]
            _tell(rank, too_large, tried.reason)
        if fitted == 0:
            raise _nothing_fits(left[0], tried.reason)
        # If G is a power of two there is nothing in between.
        left = [size for size in sizes if too_large is not None and fitted < size < too_large]
    return Found(fitted, too_large, rank.facts.world_size, rank.attempt)


def _candidates(rank: Rank) -> list[int]:
    """Return the sizes to try, at least one."""
    batch, degrees = rank.experiment.optimization.global_batch_size, rank.degrees
    parallel = rank.experiment.parallel
    found = scheduled_candidates(batch, parallel, degrees, _most_data_ranks(rank))
    if not found:
        raise BadFileError(
            f"{_KEY}: auto finds no number of micro-batches for {degrees.data_ranks} data-parallel ranks and "
            f"parallel.schedule: {parallel.schedule}; start fewer ranks, or write a larger global_batch_size"
        )
    return found


def _most_data_ranks(rank: Rank) -> int:
    """Return R; for a job with a range of nodes, the maximum R of an attempt."""
    here, slurm = rank.degrees.data_ranks, rank.experiment.slurm
    if slurm is None or not is_started_by_slurm(os.environ):
        return here
    per_node = ranks_on_each_node(slurm)
    most = find_degrees(rank.experiment.parallel, max_nodes(slurm) * per_node, per_node)
    return here if isinstance(most, Problem) else max(here, most.data_ranks)


def _nothing_fits(smallest: int, reason: str | None) -> BadFileError:
    return BadFileError(
        f"{_KEY}: auto finds nothing that fits, not even {smallest} at a time ({reason}); write "
        "activation_checkpointing: blocks, a parallel.strategy that shards, or take devices with more memory"
    )


def _tell(rank: Rank, size: int, reason: str) -> None:
    if rank.is_first:
        _log.info("%s: auto: %d does not fit (%s)", _KEY, size, reason)


@dataclass(frozen=True)
class _Tried:
    """Result of a series of trials; the same on all ranks."""

    #: Number of sizes that fit on every rank.
    num_fitted: int
    #: The rank that ran out of memory at the next size, and its error; None: all fit.
    reason: str | None


def _try(rank: Rank, control: ControlGroup, sizes: Sequence[int]) -> _Tried:
    """Run the trials through the sizes until one does not fit. Collective.

    Raises a trial's error on every rank.
    """
    torch.cuda.empty_cache()
    trial = _Trial(rank, sizes)
    try:
        return _followed(rank, control, trial, len(sizes))
    finally:
        trial.end()


def _followed(rank: Rank, control: ControlGroup, trial: _Trial, num_sizes: int) -> _Tried:
    """Poll all trials until their outcome is known."""
    has_failed = False
    while True:
        trial.look()
        weight, has_ended = _WEIGHT.get(trial.outcome, 0), trial.outcome != ""
        fitted, weightiest, all_ended = control.smallest([trial.num_fitted, -weight, int(has_ended)])
        rank.progress.at("building", part=fitted + 1)
        if weightiest == -_WEIGHT[OUT_OF_MEMORY]:
            first = control.first_text(trial.words if trial.outcome == OUT_OF_MEMORY else None)
            assert first is not None, "one rank at least ran out"
            return _Tried(fitted, f"rank {first[0]}: {first[1]}")
        # Poll once more: the cause may be another trial out of memory, which is reported a moment later.
        if weightiest == -_WEIGHT[FAILED] and has_failed:
            control.together(trial.raise_failure)
        has_failed = weightiest == -_WEIGHT[FAILED]
        if all_ended and not has_failed:
            if fitted < num_sizes:
                raise PeerLostError("the trials of micro_batch_size lost each other, and none said why")
            return _Tried(fitted, None)
        time.sleep(_POLL_S)


class _Trial:
    """This rank's trial process and its messages so far."""

    def __init__(self, rank: Rank, sizes: Sequence[int]) -> None:
        self.num_fitted = 0
        #: Empty while it runs.
        self.outcome = ""
        self.words = ""
        self._code = int(ExitCode.FAILED)
        self._receiver, sender = multiprocessing.Pipe(duplex=False)
        arguments = [rank.paths.folder, rank.attempt, sender.fileno(), os.getpid(), torch.get_num_threads()]
        with sender, signals.blocked():  # the trial ends with its rank, not by signals
            self._process = subprocess.Popen(
                [sys.executable, "-m", _TRIAL_MODULE, *map(str, [*arguments, *sizes])],
                env=_environment(sizes),
                pass_fds=(sender.fileno(),),
            )

    def look(self) -> None:
        """Read the trial's messages since the last call."""
        while not self.outcome and self._receiver.poll():
            try:
                what, self.words, self._code = self._receiver.recv()
            except EOFError:
                code, what = self._process.wait(), FAILED
                self.words = (
                    f"{_KEY}: a trial ended with exit code {code} and said nothing; see the rank's log"
                )
            if what == "fitted":
                self.num_fitted += 1
            else:
                self.outcome = what

    def raise_failure(self) -> None:
        """Raise the trial's error, if any; a user's mistake as BadFileError. Not collective."""
        if self.outcome == FAILED:
            kind = BadFileError if self._code == ExitCode.BAD_FILE else TrialError
            raise kind(self.words)

    def end(self) -> None:
        """Kill the process; return once it is gone and its memory is free."""
        self._process.kill()
        self._process.wait()
        self._receiver.close()


def _environment(sizes: Sequence[int]) -> dict[str, str]:
    """Return the rank's environment without its rendezvous address: the trials have their own rendezvous."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    # Distinguishes the rendezvous of a second series of trials from the first.
    token = f"{os.environ.get('HPC_TRAIN_TOKEN', '')}-{'-'.join(map(str, sizes))}"
    return own | {"HPC_TRAIN_TOKEN": token}
