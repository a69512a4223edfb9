"""The step of each run in ``plan``: memory by part, whether it fits, FLOPs, communication."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hpc_train.console import columns, put, say
from hpc_train.launchers.base import KnowsDevices, Launcher
from hpc_train.plan.devices import Device, device_here
from hpc_train.plan.planning import Plan, PlannedRun
from hpc_train.plan.prediction import PARTS, StepPrediction, predict

#: Set to 1: ``plan`` predicts nothing without ``--memory``.
NO_MEMORY = "HPC_TRAIN_NO_MEMORY"
_NOT_ASKED = "not predicted"
_HEADS = (
    "run",
    "micro-batch",
    "peak GB",
    *PARTS,
    "fits",
    "largest micro-batch",
    "TFLOPs per step",
    "sent GB",
)
#: GB below which a number is not shown.
_SHOWN = 0.001


def predictions(
    made: Plan, launcher: Launcher, *, is_wanted: bool | None, on_this_machine: bool
) -> list[StepPrediction] | None:
    """Return the prediction of each run's step; None if the user does not want to wait for it."""
    if is_wanted is None:
        is_wanted = os.environ.get(NO_MEMORY) != "1"
    if not is_wanted:
        return None

    def device_of(run: PlannedRun) -> Device:
        found = None
        if isinstance(launcher, KnowsDevices) and not on_this_machine:
            found = launcher.device(run.experiment, run.size)
        return found or device_here(run.experiment.device, run.size.per_node or run.ranks or 1)

    return predict(made.runs, device_of)


def json_of_runs(runs: Sequence[PlannedRun], found: Sequence[StepPrediction] | None) -> list[dict[str, Any]]:
    """Return each run's keys in ``plan --json``."""
    if found is None:
        return [run.to_json() | dict.fromkeys(_keys()) | {"memory_problem": _NOT_ASKED} for run in runs]
    return [run.to_json() | each.to_json() for run, each in zip(runs, found, strict=True)]


def show_predictions(runs: Sequence[PlannedRun], found: Sequence[StepPrediction] | None) -> None:
    """Print a table of the steps, and the assumptions behind it."""
    if found is None:
        return
    put("")
    rows = [_cells(run, each) for run, each in zip(runs, found, strict=True)]
    for line in columns([[*_HEADS], *rows]):
        put(line)
    for words in dict.fromkeys(words for each in found for words in _remarks(each)):
        say(words)


def _cells(run: PlannedRun, found: StepPrediction) -> list[str]:
    peak, memory = found.peak_memory_gb, found.memory or {}
    at_least = "at least " if found.problem else ""
    parts = [_gb(memory.get(part)) for part in PARTS]
    if found.problem:
        parts[PARTS.index("activations")] = "unknown"
    sent = found.communication
    return [
        run.id,
        _or_unknown(found.micro_batch_size),
        "unknown" if peak is None else f"{at_least}{_gb(peak)}",
        *parts,
        {True: "yes", False: "no", None: "unknown"}[found.fits],
        _or_unknown(found.largest_micro_batch_size),
        "unknown" if found.flops_per_step is None else f"{found.flops_per_step / 1e12:.3g}",
        "unknown" if sent is None else f"{_gb(sent.within_node_gb + sent.between_nodes_gb)}",
    ]


def _remarks(found: StepPrediction) -> list[str]:
    device = found.device
    words = []
    if found.problem:
        words.append(f"memory: {found.problem}")
    if found.assumption:
        words.append(f"memory: the data are not read: {found.assumption}")
    if device.memory_bytes is None:
        words.append(f"memory: the size of {device.name} is unknown; {device.remedy}")
    elif found.fits is False:
        limit = (device.limit_bytes or 0) / 1e9
        words.append(
            f"memory: a step may take {limit:.3g} of {device.memory_bytes / 1e9:.3g} GB of {device.name}; "
            'see the page "Out of memory" of the docs'
        )
    return words


def _keys() -> tuple[str, ...]:
    return tuple(StepPrediction(Device("", is_gpu=False, memory_bytes=None)).to_json())


def _or_unknown(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _gb(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.3g}" if value >= _SHOWN or value == 0 else f"<{_SHOWN:g}"
