"""Steps of a run that ``replay`` has repeated: their type in JSON, and as text."""

from __future__ import annotations

import math
from typing import TypedDict

from hpc_train.console import columns
from hpc_train.errors import counted, shortened

#: Samples per micro-batch, and modules, that the text shows.
_SHOWN_SAMPLES, _SHOWN_MODULES = 6, 8
_TEXT_LENGTH = 72


class MicroBatch(TypedDict):
    """One micro-batch of a replayed step."""

    number: int
    #: Null if it is NaN or infinite.
    loss: float | None
    #: Indices in the training data, as in ``predict``.
    samples: list[int]
    #: Their files; empty if the data have none.
    files: list[str]
    #: The beginning of their decoded tokens; empty if they are not tokens, or have no decoder here.
    texts: list[str]


class Range(TypedDict):
    """The outputs of a module in all micro-batches of a step; null: some are NaN or infinite."""

    minimum: float | None
    maximum: float | None
    #: The mean absolute value.
    mean_abs: float | None


class NonFinite(TypedDict):
    """The first number that is NaN or infinite."""

    #: ``output`` of ``module``; ``before``: computed in the forward of ``module`` before the module
    #: ``before``; ``inputs`` of the model; ``loss``; ``backward``: first in the gradients of ``module``.
    where: str
    micro_batch: int | None
    #: The name of the module; empty: the whole model.
    module: str | None
    #: Its class.
    type: str | None
    before: str | None
    has_finite_weights: bool | None


class StepNumbers(TypedDict):
    """The numbers of a step by which a replay is compared."""

    #: Digest of the indices of the samples, hexadecimal.
    samples: str
    loss: float | None
    #: Null also if the step did not compute it.
    grad_norm: float | None


class RecordedStep(StepNumbers):
    """The numbers of a step in the run's ``digests.bin``."""

    #: The attempt that trained it.
    attempt: int


class ReplayedStep(StepNumbers):
    """One step of a replay."""

    step: int
    #: Null if the run has no digest of the step.
    recorded: RecordedStep | None
    #: The numbers that are not bitwise identical to the recorded ones; null without those.
    differs: list[str] | None
    #: The numbers that both have; the norm of the gradients only if they are clipped or checked.
    compared: list[str]
    learning_rate: float
    micro_batches: list[MicroBatch]
    #: Gradient norm by module, before clipping; null if it is NaN or infinite.
    grad_norms: dict[str, float | None]
    #: By module, in the order of their calls; empty without ``--activations``.
    activations: dict[str, Range]
    non_finite: NonFinite | None


class Replayed(TypedDict):
    """One replay: as the run was, or with changed keys."""

    #: ``--set``.
    changes: list[str]
    #: Steps before ``--step`` that were compared with the run's digests.
    compared: int
    #: The first of these that differs; null: none.
    first_difference: int | None
    steps: list[ReplayedStep]


class Replay(TypedDict):
    """The steps of a run that were repeated."""

    #: The run's.
    id: str
    path: str
    #: The step of the checkpoint from which the replays began; 0: from the start.
    checkpoint: int
    ranks: int
    #: The number of ranks that trained the last of these steps; null if it is not recorded.
    ranks_of_run: int | None
    #: The replay as the run was; with ``--set`` also the changed one.
    replays: list[Replayed]


def replay_text(answer: Replay) -> list[str]:
    """Return the lines to print."""
    lines: list[str] = []
    for replayed in answer["replays"]:
        if replayed["changes"]:
            lines += ["", f"with {' '.join(replayed['changes'])}:"]
        else:
            lines += _earlier_text(replayed)
        for step in replayed["steps"]:
            lines += _step_text(step)
    if len(answer["replays"]) == 2:
        lines += ["", *_side_by_side(*answer["replays"])]
    return lines


def _earlier_text(replayed: Replayed) -> list[str]:
    if replayed["first_difference"] is not None:
        return [f"step {replayed['first_difference']} is the first that differs from the run's digests"]
    if replayed["compared"]:
        return [f"{counted(replayed['compared'], 'step')} before: bitwise identical to the run"]
    return []


def _step_text(step: ReplayedStep) -> list[str]:
    numbers = f"loss {_shown(step['loss'])}, gradient norm {_shown(_norm(step))}"
    lines = [
        f"step {step['step']}: {numbers}, learning rate {step['learning_rate']:.6g}",
        f"  {_comparison(step)}",
    ]
    rows = [["micro-batch", "loss", "samples"]]
    for batch in step["micro_batches"]:
        names = batch["files"] or list(map(str, batch["samples"]))
        more = f" … {len(names)} in all" if len(names) > _SHOWN_SAMPLES else ""
        rows.append([str(batch["number"]), _shown(batch["loss"]), " ".join(names[:_SHOWN_SAMPLES]) + more])
    lines += [f"  {line}" for line in columns(rows)]
    lines += _text_lines(step)
    norms = sorted(step["grad_norms"].items(), key=lambda item: -_order(item[1]))
    title = f"gradient norm, {counted(len(norms), 'module')}"
    rows = [[title if len(norms) <= _SHOWN_MODULES else f"{title}, the largest", ""]]
    rows += [[module or "(model)", _shown(value)] for module, value in norms[:_SHOWN_MODULES]]
    lines += [f"  {line}" for line in columns(rows)]
    if step["activations"]:
        rows = [["outputs of modules", "minimum", "maximum", "mean absolute value"]]
        for module, values in step["activations"].items():
            shown = [_shown(values[key]) for key in ("minimum", "maximum", "mean_abs")]
            rows.append([module or "(model)", *shown])
        lines += [f"  {line}" for line in columns(rows)]
    if step["non_finite"] is not None:
        lines.append(f"  {_non_finite_text(step['non_finite'])}")
    return lines


def _text_lines(step: ReplayedStep) -> list[str]:
    """Return the samples with their texts, of the micro-batches with the highest loss first."""
    batches = sorted(step["micro_batches"], key=lambda batch: -_order(batch["loss"]))
    samples = [pair for batch in batches for pair in zip(batch["samples"], batch["texts"], strict=False)]
    rows = [[str(index), shortened(text, _TEXT_LENGTH)] for index, text in samples[:_SHOWN_SAMPLES]]
    more = f", {len(rows)} of {len(samples)}" if len(samples) > len(rows) else ""
    return [f"  {line}" for line in columns([["sample", f"text{more}"], *rows])] if rows else []


def _order(number: float | None) -> float:
    return math.inf if number is None else number


def _norm(step: ReplayedStep) -> float | None:
    """Return the gradients' norm: the one that the step computed, else that of all modules."""
    norms = step["grad_norms"].values()
    return step["grad_norm"] or (None if None in norms else math.hypot(*(norm or 0.0 for norm in norms)))


def _shown(number: float | None) -> str:
    return "NaN or infinite" if number is None else f"{number:.6g}"


def _comparison(step: ReplayedStep) -> str:
    recorded, differs = step["recorded"], step["differs"]
    if recorded is None or differs is None:
        return "the run has no digest of this step (checkpoint.digests)"
    if not differs:
        names = ", ".join(step["compared"]).replace("grad_norm", "gradient norm")
        return f"bitwise identical to the run: {names}"
    parts = []
    for name in differs:
        if name == "samples":
            parts.append("other samples")
        else:
            now, then = (part["loss"] if name == "loss" else part["grad_norm"] for part in (step, recorded))
            label = "loss" if name == "loss" else "gradient norm"
            parts.append(f"{label} {_exact(then)} in the run, {_exact(now)} here{_distance(now, then)}")
    return f"differs: {'; '.join(parts)}"


def _exact(number: float | None) -> str:
    return "NaN or infinite" if number is None else repr(number)


def _distance(now: float | None, then: float | None) -> str:
    if now is None or then is None or then == 0:
        return ""
    return f" (by {abs(now - then) / abs(then):.1e})"


def _non_finite_text(place: NonFinite) -> str:
    batch = "" if place["micro_batch"] is None else f" of micro-batch {place['micro_batch']}"
    kind = f" ({place['type']})" if place["type"] else ""
    module = f"{place['module'] or 'the model'}{kind}"
    if place["where"] == "output":
        weights = "" if place["has_finite_weights"] else ", whose weights are not finite"
        return f"first NaN or infinity{batch}: the output of {module}{weights}"
    if place["where"] == "before":
        return f"first NaN or infinity{batch}: computed by {module} before it calls {place['before']}"
    if place["where"] == "inputs":
        return f"first NaN or infinity{batch}: the inputs of the model"
    if place["where"] == "loss":
        return f"first NaN or infinity{batch}: the loss, though the outputs of all modules are finite"
    return f"first NaN or infinity: the gradients of {module}; forward and loss are finite"


def _side_by_side(before: Replayed, after: Replayed) -> list[str]:
    rows = [["step", "loss", "changed", "gradient norm", "changed"]]
    for first, second in zip(before["steps"], after["steps"], strict=False):
        numbers = first["loss"], second["loss"], _norm(first), _norm(second)
        rows.append([str(first["step"]), *map(_shown, numbers)])
    return columns(rows)
