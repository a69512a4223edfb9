"""Resuming: restores the newest checkpoint, and compares its data, versions, ranks and hardware with today's.

``extra`` is a checkpoint's record of them. Other ranks, another processor or number of threads are reported,
never refused. Each CPU thread adds up a part of a sum, so a different number of threads rounds differently:
the number is taken from the checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from hpc_train.errors import BadFileError, EnvironmentRefusesError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.training_sections import NormalizeConfig
from hpc_train.experiment.topology.batch_arithmetic import BatchArithmetic
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.rank.env import THREADS_BY_SHARE
from hpc_train.run import versions
from hpc_train.run.checkpoints import VERIFIED
from hpc_train.training.checkpoint.checkpointer import Checkpointer, Loaded
from hpc_train.training.checkpoint.control_group import ControlGroup
from hpc_train.training.datasets.base import DataSource
from hpc_train.training.datasets.sampler import Position
from hpc_train.training.rank import Rank
from hpc_train.training.train_state import TrainState

_NOT_BITWISE = "weights equal an uninterrupted run's up to rounding, not bitwise"
_SYNCED = (
    "parallel.sync_batchnorm takes its statistics over one micro-batch of every rank, so the weights become "
    "others than an uninterrupted run's"
)
_OTHER_DROPOUT = "dropout behind a pipeline's first stage draws other numbers"
_ROUNDING = "the weights may differ in the last bit from here on"


class OtherVersionsError(EnvironmentRefusesError):
    """The environment differs from that of the checkpoint, and ``environment.strict`` is set."""


@dataclass(frozen=True)
class Resumed:
    """The point from which training continues; ``skips``: steps skipped so far by ``on_non_finite: skip``.

    ``verified``: the newest step up to which the weights are trusted (``recovery.verify_every_steps``).
    """

    position: Position
    hardware: Hardware
    skips: int = 0
    verified: int = 0


def resumed(
    rank: Rank,
    checkpointer: Checkpointer,
    train_state: TrainState,
    source: DataSource,
    step: int | None = None,
) -> Resumed:
    """Restore the newest complete checkpoint, or that of ``step``; return step 0 if there is none.

    Raises StorageError if all are damaged, OtherVersionsError if versions differ under
    ``environment.strict``, BadFileError if the data have changed or the checkpoint has no position.
    """
    if step is None:
        loaded = checkpointer.load_newest(train_state.state)
    else:
        loaded = checkpointer.load(step, train_state.state) if step else None
    then, step = (None, 0) if loaded is None else (loaded.extra.get("hardware"), loaded.step)
    now = take_over(then, step, rank.device, checkpointer.ranks, rank.warn)
    if loaded is None:
        return Resumed(Position(0), now)
    _compare_versions(rank, loaded)
    norms = {"has_batchnorm": train_state.has_batchnorm, "is_synced": rank.experiment.parallel.sync_batchnorm}
    if (message := difference(loaded.extra, _ranks(rank), loaded.step, **norms)) is not None:
        rank.warn(message)
    _check_data(loaded, source)
    saved = loaded.extra.get("position")
    if saved is None:
        raise BadFileError(f"checkpoint {loaded.step}: state.json does not contain the position of training")
    if saved["step"] > 0:
        # The rate of the step that produced these weights: a save before the next step records it.
        train_state.optimization.set_learning_rate(saved["step"] - 1)
    position = Position(saved["step"], tuple(saved["skipped"]))
    # A run that was not verified before is trusted up to here.
    return Resumed(position, now, loaded.extra.get("skips", 0), loaded.extra.get(VERIFIED, loaded.step))


def _compare_versions(rank: Rank, loaded: Loaded) -> None:
    """Warn about versions that differ from those at the save; refuse them under ``environment.strict``."""
    now = _versions()
    then = {key: value for key, value in loaded.extra.get("versions", {}).items() if key in now}
    differences = versions.differences(then, {key: now[key] for key in then})
    if not differences:
        return
    message = f"checkpoint {loaded.step} was saved with other versions: {versions.in_words(differences)}"
    if rank.experiment.environment.strict:
        raise OtherVersionsError(
            f"environment.strict: {message}; use those versions, or resume with environment.strict=false"
        )
    rank.warn(f"{message}; the weights may differ in the last bit from here on")


def _ranks(rank: Rank) -> dict[str, Any]:
    return conditions(rank.facts.world_size, rank.experiment.parallel.strategy, rank.degrees)


def _check_data(loaded: Loaded, source: DataSource) -> None:
    """Refuse data with another number of samples or other classes than the checkpoint was trained on."""
    then, now = loaded.extra.get("data"), _data_facts(source)
    if then is None or all(then[key] == now[key] for key in ("num_samples", "classes")):
        return
    what = "training samples" if then["num_samples"] != now["num_samples"] else "classes"
    counts = f": {then['num_samples']} then, {now['num_samples']} now" if what == "training samples" else ""
    raise BadFileError(
        f"data.root: the {what} are not those that checkpoint {loaded.step} was trained on{counts}; "
        "restore the data, or train again with hpc-train submit --new"
    )


def refuse_other_classes(loaded: Loaded, source: DataSource) -> None:
    """Raise BadFileError if the data have other classes than the checkpoint was trained on."""
    then = loaded.extra.get("data")
    if then is not None and then["classes"] != _data_facts(source)["classes"]:
        raise BadFileError(
            f"data: the classes are not those that checkpoint {loaded.step} was trained on; use data with "
            "the same classes, in folders of the same names"
        )


def normalized_as_trained(experiment: Experiment, loaded: Loaded) -> Experiment:
    """Return the experiment with mean and std of the checkpoint's training data, if the file has none."""
    then = loaded.extra.get("data") or {}
    if experiment.data.normalize is not None or not then.get("mean"):
        return experiment
    normalize = NormalizeConfig(mean=then["mean"], std=then["std"])
    data = experiment.data.model_copy(update={"normalize": normalize})
    return experiment.model_copy(update={"data": data})


def _data_facts(source: DataSource) -> dict[str, Any]:
    normalization = {"mean": list(source.info.mean), "std": list(source.info.std)}
    return {"num_samples": len(source.train), "classes": source.info.classes_hash} | normalization


def extra(
    rank: Rank,
    source: DataSource,
    batches: BatchArithmetic,
    position: Position,
    hardware: Hardware,
    skips: int,
) -> dict[str, Any]:
    """Return the content of a checkpoint besides tensors: its position and its history."""
    return {
        "position": {"step": position.step, "skipped": list(position.skipped)},
        "skips": skips,
        "seed": rank.experiment.seed,
        "data": _data_facts(source) | {"info": asdict(source.info)},
        "micro_batches": batches.micro_batches,
        "steps_per_epoch": batches.steps_per_epoch,
        "precision": rank.experiment.precision,
        "device": rank.device.type,
        "hardware": asdict(hardware),
        "versions": dict(_versions()),
        **_ranks(rank),
    }


@cache
def _versions() -> dict[str, str]:
    """Return the versions at this process's first call, since each save would read the packages' metadata."""
    return versions.versions()


def conditions(world_size: int, strategy: str, degrees: Degrees) -> dict[str, Any]:
    """Return a checkpoint's description of the ranks that save it, as JSON."""
    return {"world_size": world_size, "strategy": strategy, "degrees": asdict(degrees)}


def difference(
    then: Mapping[str, Any], now: Mapping[str, Any], step: int, *, has_batchnorm: bool, is_synced: bool
) -> str | None:
    """Return the effect of continuing from checkpoint ``step``; None if the same ranks continue.

    ``then`` and ``now`` are the ``conditions`` at the save and here; ``is_synced``:
    ``parallel.sync_batchnorm``.
    """
    differing = {key for key in now if key in then and then[key] != now[key]}
    if not differing:
        return None
    only_degrees = differing == {"degrees"}
    effects = [f"the same micro-batches in the same order; {_NOT_BITWISE}"]
    if has_batchnorm and is_synced and _data_ranks(then) != _data_ranks(now):
        effects = [_SYNCED]
    if "degrees" in differing and then["degrees"]["pipeline"] != now["degrees"]["pipeline"]:
        effects.append(_OTHER_DROPOUT)
    who = f"{_described(now, only_degrees)} from checkpoint {step} of {_described(then, only_degrees)}"
    return f"continuing with {who}: {'; '.join(effects)}"


def _data_ranks(ranks: Mapping[str, Any]) -> int:
    return Degrees(**ranks["degrees"]).data_ranks


def _described(ranks: Mapping[str, Any], with_degrees: bool) -> str:
    """Return ``2 ranks under ddp``."""
    count = ranks["world_size"]
    text = f"{count} rank{'' if count == 1 else 's'} under {ranks['strategy']}"
    return f"{text} ({Degrees(**ranks['degrees'])})" if with_degrees else text


@dataclass(frozen=True)
class Hardware:
    """Processor and threads of an attempt's ranks; the same on all of them unless nodes are mixed."""

    #: This rank's processor.
    processor: str
    #: Threads of one operation on the CPU, by rank.
    threads: list[int]


def take_over(
    then: object, step: int, device: torch.device, ranks: ControlGroup, say: Callable[[str], None]
) -> Hardware:
    """Set the number of threads of checkpoint ``step``'s ranks; return the hardware used from now on.

    Collective. ``then``: ``hardware`` in the ``extra`` of the checkpoint; None without one. ``say`` receives
    a message about each difference that may change results. A number of threads that the user set
    (OMP_NUM_THREADS) is not changed.
    """
    recorded = then if isinstance(then, Mapping) else {}
    wanted = _threads(recorded.get("threads"), ranks.world_size)
    on_cpu, share = device.type == "cpu", torch.get_num_threads()
    # Set by the user, rather than by our launcher to the rank's share.
    omp_threads = "" if THREADS_BY_SHARE in os.environ else os.environ.get("OMP_NUM_THREADS", "")
    is_set_by_user = omp_threads.isdecimal() and int(omp_threads) > 0
    if on_cpu and wanted is not None and not is_set_by_user:
        torch.set_num_threads(wanted[ranks.rank])
    used = torch.get_num_threads()
    threads = ranks.total([used if rank == ranks.rank else 0 for rank in range(ranks.world_size)])
    now = Hardware(processor(device), threads)
    if on_cpu and wanted is not None and wanted != threads:
        counts = f"{_counts(wanted)} then, {_counts(threads)} now (OMP_NUM_THREADS)"
        say(f"checkpoint {step} was computed with other threads per rank: {counts}; {_ROUNDING}")
    elif on_cpu and used > share:
        say(
            f"a rank computes with {used} threads as before, where its share of the cores is {share}: "
            "slower, but bitwise identical; OMP_NUM_THREADS sets another number"
        )
    before = recorded.get("processor")
    if isinstance(before, str) and before != now.processor:
        say(f"checkpoint {step} was computed on another processor: {before} → {now.processor}; {_ROUNDING}")
    return now


def processor(device: torch.device) -> str:
    """Return the model of the GPU, or of the CPU with the instructions that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{versions.cpu_model()} ({torch.backends.cpu.get_cpu_capability()})"


def _threads(noted: object, world_size: int) -> list[int] | None:
    """Return the recorded threads by rank; None if unknown or recorded for another number of ranks."""
    if not isinstance(noted, list) or len(noted) != world_size:
        return None
    return noted if all(type(count) is int and 1 <= count <= 4096 for count in noted) else None


def _counts(threads: list[int]) -> str:
    """Return ``4``, or ``4, 4, 3`` if ranks differ."""
    return ", ".join(map(str, threads if len(set(threads)) > 1 else threads[:1]))
