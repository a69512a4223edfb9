"""The first difference between two replays: its search, JSON and text.

Replays are compared by the lines of their ranks (``training.replaying``), which have digests of tensors.
Within a step the values are compared in the order in which they are computed: the state before the step,
samples, inputs, each micro-batch's forward, loss and backward, the gradients, the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, TypedDict, cast

from hpc_train.errors import listed
from hpc_train.report.replayed_steps import StepNumbers
from hpc_train.run.digests import StepDigest, module_of
from hpc_train.run.metric_rows import finite

#: Step → its line by rank.
Lines = Mapping[int, Sequence[Mapping[str, Any]]]
#: Number of tensors in JSON, and of tensors and of samples in the text.
MAX_NAMES, _SHOWN_NAMES, _SHOWN_SAMPLES = 100, 4, 6
_LABELS = {"samples": "samples", "loss": "loss", "grad_norm": "gradient norm"}


class Place(TypedDict):
    """The first difference."""

    step: int
    #: ``state``: tensors before the step; ``samples``, ``inputs``, ``targets`` of a micro-batch; ``before``:
    #: the inputs of ``module``, computed by the module that calls it; ``forward``: the output of ``module``;
    #: ``loss``; ``backward``: the gradient of the output of ``module``; ``gradients`` of parameters;
    #: ``learning_rate``; ``grad_norm``; ``update``: tensors after the step. Of a run against its own replay,
    #: ``checkpoint``: tensors that it saved after the step; ``part``: digests in ``parts.bin``, and
    #: ``tensors`` are weights or optimizer state of modules; ``record``: the numbers of the step's digest.
    where: str
    #: The run that differs from its own replay; null: the runs differ from each other.
    run: str | None
    #: Null: of the whole step.
    micro_batch: int | None
    #: Empty: the whole model; null: not known.
    module: str | None
    #: The first of ``tensors``.
    tensor: str | None
    #: Names of the tensors that differ, at most 100, and their number.
    tensors: list[str]
    num_tensors: int
    #: The number of tensors that were compared; before a ``loss``, of values of modules.
    num_compared: int
    #: Null: on all ranks.
    rank: int | None
    #: Its node in each run; null if unknown.
    nodes: list[str | None]
    #: The two values, if they are numbers or samples.
    values: list[Any]


def place(step: int, where: str, **facts: Any) -> Place:
    """Return the place with the given facts; the others are unknown."""
    unknown = dict.fromkeys(Place.__annotations__) | {"tensors": [], "nodes": [], "values": []}
    counts = {"num_tensors": 0, "num_compared": 0}
    return cast("Place", {**unknown, **counts, "step": step, "where": where, **facts})


def step_digest(line: Mapping[str, Any], key: str = "digest") -> StepDigest | None:
    """Return the digest that rank 0 computed, or read from the run (``recorded``); None without one."""
    numbers = line.get(key)
    if numbers is None:
        return None
    return StepDigest(line["step"], int(numbers["samples"], 16), numbers["loss"], numbers["grad_norm"])


def first_step(first: Lines, second: Lines, *, has_same_layout: bool) -> int | None:
    """Return the first step of both replays after which a number or the state differs; None if none does.

    The state is compared only if the same ranks have the same parts of tensors (``has_same_layout``).
    """
    for step in sorted(first.keys() & second.keys()):
        ones, others = first[step], second[step]
        if has_same_layout and [line["state"] for line in ones] != [line["state"] for line in others]:
            return step
        one, other = step_digest(ones[0]), step_digest(others[0])
        if one is not None and other is not None and one.differences(other):
            return step
    return None


def parted_at(step: int, first: Lines, second: Lines, *, has_same_layout: bool) -> Place | None:
    """Return the first difference within a step, of which both replays have the digests of tensors."""
    ones, others = first.get(step, ()), second.get(step, ())
    same: list[Iterator[Place]] = [iter(()), iter(()), iter(())]
    if has_same_layout:
        same = [
            tensor_places(step, "state", first.get(step - 1, ()), second.get(step - 1, ())),
            tensor_places(step, "gradients", ones, others, "gradients", order=reversed),
            tensor_places(step, "update", ones, others, order=_optimizer_first),
        ]
    state, gradients, update = same
    if not ones or not others:
        return next(state, None)
    numbers = _numbers(step, ones[0], others[0])
    return next(chain(state, _micro_batches(step, ones, others), gradients, numbers, update), None)


def _optimizer_first(names: Sequence[str]) -> Sequence[str]:
    """Return the names in the order of the update: the optimizer's state, the weights, their averages."""
    kinds = ("optimizer.", "model.", "ema.")
    return sorted(names, key=lambda name: [name.startswith(kind) for kind in kinds], reverse=True)


def tensor_places(
    step: int,
    where: str,
    ones: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
    key: str = "tensors",
    order: Callable[[Sequence[str]], Any] = iter,
) -> Iterator[Place]:
    """Yield the place of tensors that differ, if both have digests; ``order``: of the tensors' names."""
    pairs = [(one.get(key), other.get(key)) for one, other in zip(ones, others, strict=False)]
    compared: dict[str, list[int]] = {}
    for rank, (one, other) in enumerate(pairs):
        if one is None or other is None:
            continue
        for name in dict.fromkeys([*one, *other]):
            compared.setdefault(name, [])
            if one.get(name) != other.get(name):
                compared[name].append(rank)
    names = [name for name in order(list(compared)) if compared[name]]
    if names:
        ranks = compared[names[0]]
        yield place(
            step,
            where,
            module=names[0].rpartition(".")[0] if where == "gradients" else module_of(names[0]),
            tensor=names[0],
            tensors=names[:MAX_NAMES],
            num_tensors=len(names),
            num_compared=len(compared),
            rank=None if len(ranks) == len(pairs) > 1 else ranks[0],
        )


class _Batch:
    """One micro-batch of a replayed step, and the values that it computed, in their order."""

    def __init__(self, rank: int, data: Mapping[str, Any], events: Sequence[Sequence[Any]]) -> None:
        self.rank, self.data = rank, data
        of_batch = [tuple(event[1:]) for event in events if event[0] == data["number"]]
        forward = [event for event in of_batch if event[0] != "backward"]
        backward = [event for event in of_batch if event[0] == "backward"]
        self.events = [*forward, ("loss", None, repr(data["loss"])), *backward]


def micro_batches(lines: Sequence[Mapping[str, Any]]) -> dict[int, tuple[int, Mapping[str, Any]]]:
    """Return by number each micro-batch of a step, and the rank that recorded it."""
    batches: dict[int, tuple[int, Mapping[str, Any]]] = {}
    for rank, line in enumerate(lines):
        for data in line.get("micro_batches", ()):
            # Ranks that share a copy of the model read the same micro-batches; one of them has the loss.
            if data["number"] not in batches or data["loss"] is not None:
                batches[data["number"]] = rank, data
    return batches


def _micro_batches(
    step: int, ones: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> Iterator[Place]:
    first, second = (
        {
            number: _Batch(rank, data, lines[rank].get("events", ()))
            for number, (rank, data) in batches.items()
        }
        for lines, batches in ((lines, micro_batches(lines)) for lines in (ones, others))
    )
    for number in sorted({*first, *second}):
        pair = [batches.get(number) for batches in (first, second)]
        samples = [batch.data["samples"] if batch else [] for batch in pair]
        if samples[0] != samples[1]:
            rank = (second.get(number) or first[number]).rank
            yield place(step, "samples", micro_batch=number, rank=rank, values=samples)
    pairs = [(number, first[number], second[number]) for number in sorted(first.keys() & second.keys())]
    for number, one, other in pairs:
        for part in ("inputs", "targets"):
            if one.data.get(part) != other.data.get(part):
                samples = [one.data["samples"], other.data["samples"]]
                yield place(step, part, micro_batch=number, rank=other.rank, values=samples)
    for number, one, other in pairs:
        # A compiled model and a pipeline have no values of modules.
        num_values = min(len(one.events), len(other.events)) - 1
        events = [
            [event for event in batch.events if num_values or event[0] == "loss"] for batch in (one, other)
        ]
        for event, now in zip_longest(*events):
            if event != now:
                kind, module, _ = now or event
                values = [one.data["loss"], other.data["loss"]] if kind == "loss" else []
                where = {"input": "before", "output": "forward"}.get(kind, kind)
                facts = {"micro_batch": number, "module": module, "rank": other.rank}
                compared = num_values if kind == "loss" else 0
                yield place(step, where, **facts, values=finite(values), num_compared=compared)
                break


def _numbers(step: int, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Place]:
    rates = [one.get("learning_rate"), other.get("learning_rate")]
    if rates[0] != rates[1]:
        yield place(step, "learning_rate", values=rates)
    first, second = step_digest(one), step_digest(other)
    if first is not None and second is not None:
        for name in first.differences(second):
            if name != "samples":
                values = [getattr(digest, name) for digest in (first, second)]
                yield place(step, name, values=finite(values))


def step_numbers(digest: StepDigest) -> StepNumbers:
    """Return the numbers of a digest for JSON."""
    loss, norm = finite([digest.loss, digest.grad_norm])
    return StepNumbers(samples=f"{digest.samples:016x}", loss=loss, grad_norm=norm)


def common_steps(
    first: Iterator[StepDigest], second: Iterator[StepDigest]
) -> Iterator[tuple[StepDigest, StepDigest]]:
    """Yield the digests of the steps that both have."""
    one, other = next(first, None), next(second, None)
    while one is not None and other is not None:
        if one.step == other.step:
            yield one, other
            one, other = next(first, None), next(second, None)
        elif one.step < other.step:
            one = next(first, None)
        else:
            other = next(second, None)


def place_text(where: Place, names: Sequence[str]) -> list[str]:
    """Return the lines about the first difference. ``names``: of the two runs, or of one."""
    parts = [f"step {where['step']}"]
    if where["micro_batch"] is not None:
        parts.append(f"micro-batch {where['micro_batch']}")
    if where["rank"] is not None:
        nodes = [f"{node} in {name}" for name, node in zip(names, where["nodes"], strict=False) if node]
        if len(set(where["nodes"])) == 1 and nodes:
            nodes = [f"node {where['nodes'][0]}"]
        parts.append(f"rank {where['rank']}" + f" ({', '.join(nodes)})" * bool(nodes))
    lines = [f"first difference: {', '.join(parts)}", f"  {_difference(where)}"]
    if where["num_tensors"] > 1:
        tensors = listed(where["tensors"], _SHOWN_NAMES)
        noun = "digests" if where["where"] == "part" else "tensors"
        lines.append(f"  {where['num_tensors']} of {where['num_compared']} {noun} differ: {tensors}")
    return lines


def _difference(where: Place) -> str:
    module, tensor = where["module"] or "the model", where["tensor"] or "a tensor"
    name = where["run"] or "the runs"
    one, other = (where["values"] or [None, None])[:2]
    parent = (where["module"] or "").rpartition(".")[0] or "the model"
    texts = {
        "state": f"{tensor} already differs before this step",
        "samples": f"other samples: {_samples(one)} and {_samples(other)}",
        "inputs": f"other inputs of the same samples, {_samples(one)}: files, decoding or augmentation",
        "targets": f"other targets of the same samples, {_samples(one)}",
        "before": f"the inputs of {module}, computed by {parent}; all values before are the same",
        "forward": f"the output of {module}; its inputs are the same",
        "loss": f"the loss, {one!r} and {other!r}; the output of the model is the same",
        "backward": f"the gradient of the output of {module}; forward and loss are the same",
        "gradients": f"the gradient of {tensor}; samples and losses are the same",
        "learning_rate": f"the learning rate, {one} and {other}; samples, losses and gradients are the same",
        "grad_norm": f"the norm of the gradients, {one!r} and {other!r}; samples and losses are the same",
        "update": f"the update of {tensor}; samples, losses, gradients and learning rate are the same",
        "checkpoint": f"{tensor} in the checkpoint of {name} is not that of its replay",
        "part": f"the {tensor} in {name} after the step; its replay has others",
        "record": f"the numbers of {name} are not those of the replay; no checkpoint shows the tensor",
    }
    if where["where"] == "loss" and where["micro_batch"] is not None and not where["num_compared"]:
        return (
            f"the loss, {one!r} and {other!r}; samples, inputs and targets are the same. Values of modules "
            "are not compared: a run is compiled, or a pipeline"
        )
    if where["where"] == "before" and not where["module"]:
        return "the inputs of the model after normalization and mixing; those of the data are the same"
    return texts[where["where"]]


def _samples(indices: object) -> str:
    names = list(map(str, indices)) if isinstance(indices, list) else []
    return listed(names, _SHOWN_SAMPLES) or "none"


def labels(names: Sequence[str]) -> str:
    """Return ``loss, gradient norm``."""
    return ", ".join(_LABELS[name] for name in names)
