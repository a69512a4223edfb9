"""The first difference between two replays, or between a replay and its run: its search, JSON and text.

Replays are compared by the lines of their ranks (``training.replaying``), which have digests of tensors.
Within a step the values are compared in the order in which they are computed: the state before the step,
samples, inputs, each micro-batch's forward, loss and backward, the gradients, the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, TypedDict, cast

from hpc_train.console import say
from hpc_train.errors import BadFileError, counted, listed
from hpc_train.paths import CheckpointPaths
from hpc_train.report.replayed_steps import StepNumbers
from hpc_train.run.checkpoints import Manifest
from hpc_train.run.digests import StepDigest, shard_digests

#: Step → its line by rank.
Lines = Mapping[int, Sequence[Mapping[str, Any]]]
#: Number of tensors in JSON, and of tensors and of samples or checkpoints in the text.
_JSON_NAMES, _SHOWN_NAMES, _SHOWN_SAMPLES = 100, 4, 6
_LABELS = {"samples": "samples", "loss": "loss", "grad_norm": "gradient norm"}


class Place(TypedDict):
    """The first difference."""

    step: int
    #: ``state``: tensors before the step; ``samples``, ``inputs``, ``targets`` of a micro-batch; ``before``:
    #: the inputs of ``module``, computed by the module that calls it; ``forward``: the output of ``module``;
    #: ``loss``; ``backward``: the gradient of the output of ``module``; ``gradients`` of parameters;
    #: ``learning_rate``; ``grad_norm``; ``update``: tensors after the step. Of a run against its own replay,
    #: ``checkpoint``: tensors that it saved after the step; ``record``: the numbers of the step's digest.
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
    #: The number of tensors that were compared.
    num_compared: int
    #: Null: on all ranks.
    rank: int | None
    #: Its node in each run; null if unknown.
    nodes: list[str | None]
    #: The two values, if they are numbers or samples.
    values: list[Any]


class Reproduction(TypedDict):
    """A run against its own replay."""

    run: str
    #: The step of the checkpoint from which the replay began; 0: the start.
    checkpoint: int
    ranks: int
    #: Null if the run has neither digests nor checkpoints of the replayed steps.
    is_reproducible: bool | None
    #: Steps whose digests were compared, up to the first difference.
    compared: int
    #: The first step whose digests differ; null: none.
    first_difference: int | None
    #: ``samples``, ``loss``, ``grad_norm`` of this step.
    differs: list[str]
    #: Checkpoints of the run that are bitwise identical to the replay, and the first one that is not.
    equal_checkpoints: list[int]
    other_checkpoint: int | None


def place(step: int, where: str, **facts: Any) -> Place:
    """Return the place with the given facts; the others are unknown."""
    unknown = Place(
        step=step,
        where=where,
        run=None,
        micro_batch=None,
        module=None,
        tensor=None,
        tensors=[],
        num_tensors=0,
        num_compared=0,
        rank=None,
        nodes=[],
        values=[],
    )
    return cast("Place", {**unknown, **facts})


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
    """Yield the place of the tensors that differ, if there are any and both have digests of them.

    ``order``: of the tensors' names, which are in the order of the model.
    """
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
            module=_module_of(names[0], where),
            tensor=names[0],
            tensors=names[:_JSON_NAMES],
            num_tensors=len(names),
            num_compared=len(compared),
            rank=None if len(ranks) == len(pairs) > 1 else ranks[0],
        )


def _module_of(tensor: str, where: str) -> str:
    """Return the module of a gradient or a tensor of the state, such as ``optimizer.a.weight.exp_avg``."""
    name = tensor if where == "gradients" else tensor.partition(".")[2]
    return (name.rpartition(".")[0] if tensor.startswith("optimizer.") else name).rpartition(".")[0]


class _Batch:
    """One micro-batch of a replayed step, and the values that it computed, in their order."""

    def __init__(self, rank: int, data: Mapping[str, Any], events: Sequence[Sequence[Any]]) -> None:
        self.rank, self.data = rank, data
        of_batch = [tuple(event[1:]) for event in events if event[0] == data["number"]]
        forward = [event for event in of_batch if event[0] != "backward"]
        backward = [event for event in of_batch if event[0] == "backward"]
        self.events = [*forward, ("loss", None, repr(data["loss"])), *backward]


def _batches(lines: Sequence[Mapping[str, Any]]) -> dict[int, _Batch]:
    batches: dict[int, _Batch] = {}
    for rank, line in enumerate(lines):
        for data in line.get("micro_batches", ()):
            # Ranks that share a copy of the model read the same micro-batches; one of them has the loss.
            if data["number"] not in batches or data["loss"] is not None:
                batches[data["number"]] = _Batch(rank, data, line.get("events", ()))
    return batches


def _micro_batches(
    step: int, ones: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> Iterator[Place]:
    first, second = _batches(ones), _batches(others)
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
        for event, now in zip_longest(one.events, other.events):
            if event != now:
                kind, module, _ = now or event
                values = [one.data["loss"], other.data["loss"]] if kind == "loss" else []
                where = {"input": "before", "output": "forward"}.get(kind, kind)
                yield place(
                    step, where, micro_batch=number, module=module, rank=other.rank, values=_finite(values)
                )
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
                yield place(step, name, values=_finite(values))


def step_numbers(digest: StepDigest) -> StepNumbers:
    """Return the numbers of a digest for JSON."""
    loss, norm = _finite([digest.loss, digest.grad_norm])
    return StepNumbers(samples=f"{digest.samples:016x}", loss=loss, grad_norm=norm)


def _finite(values: Sequence[float | None]) -> list[float | None]:
    """Return the values for JSON: None for NaN and infinity."""
    return [value if value is not None and math.isfinite(value) else None for value in values]


def reproduction(
    run: str, checkpoints: Mapping[int, CheckpointPaths], lines: Lines, begin: int
) -> tuple[Reproduction, Place | None]:
    """Return the comparison of a run with its replay, and their first difference.

    ``checkpoints``: of the run, by step. The replay has digests of the tensors at these steps.
    """
    places: list[Place] = []
    answer = _begun(run, lines, begin)
    for step, of_ranks in lines.items():
        computed, recorded = (step_digest(of_ranks[0], key) for key in ("digest", "recorded"))
        if computed is not None and recorded is not None:
            if differs := recorded.differences(computed):
                answer["first_difference"], answer["differs"] = step, differs
                places.append(place(step, "record"))
                break
            answer["compared"] += 1
    for step, checkpoint in checkpoints.items():
        compared = _against_checkpoint(lines[step], checkpoint) if begin < step in lines else None
        if compared is not None and compared["num_tensors"]:
            answer["other_checkpoint"] = step
            places.append(compared)
            break
        if compared is not None:
            answer["equal_checkpoints"].append(step)
    return answer, _first_of(places, answer)


def near(
    run: str, checkpoints: Mapping[int, CheckpointPaths], lines: Lines, begin: int, tolerance: float
) -> tuple[Reproduction, Place | None, float]:
    """Return the same comparison with a tolerance, and the largest relative difference.

    Of the loss, the gradients' norm, and the norm of all weights at a checkpoint; samples must be the same.
    """
    places: list[Place] = []
    answer = _begun(run, lines, begin)
    largest = 0.0
    for step, of_ranks in lines.items():
        computed, recorded = (step_digest(of_ranks[0], key) for key in ("digest", "recorded"))
        if computed is None or recorded is None:
            continue
        names = recorded.differences(computed)
        relative = {name: _relative(getattr(computed, name), getattr(recorded, name)) for name in names}
        largest = max([largest, *(value for name, value in relative.items() if name != "samples")])
        if differs := [name for name, value in relative.items() if name == "samples" or value > tolerance]:
            answer["first_difference"], answer["differs"] = step, differs
            places.append(place(step, "record"))
            break
        answer["compared"] += 1
    for step in (step for step in checkpoints if begin < step in lines and "distances" in lines[step][0]):
        distance, tensor = _distance([line["distances"] for line in lines[step]])
        largest = max(largest, distance)
        if distance > tolerance:
            answer["other_checkpoint"] = step
            module = _module_of(tensor, "checkpoint")
            places.append(place(step, "checkpoint", module=module, tensor=tensor, num_compared=1))
            break
        answer["equal_checkpoints"].append(step)
    return answer, _first_of(places, answer), largest


def _begun(run: str, lines: Lines, begin: int) -> Reproduction:
    return Reproduction(
        run=run,
        checkpoint=begin,
        ranks=len(next(iter(lines.values()))),
        is_reproducible=None,
        compared=0,
        first_difference=None,
        differs=[],
        equal_checkpoints=[],
        other_checkpoint=None,
    )


def _first_of(places: Sequence[Place], answer: Reproduction) -> Place | None:
    """Return the first place, of the same step the checkpoint's, which names tensors; complete ``answer``."""
    if answer["compared"] or answer["equal_checkpoints"] or places:
        answer["is_reproducible"] = not places
    first = min(places, key=lambda one: (one["step"], one["where"] == "record"), default=None)
    if first is not None:
        first["run"] = answer["run"]
    return first


def _relative(number: float | None, reference: float | None) -> float:
    """Return the relative difference; infinite if one of the numbers is not finite."""
    if number is None or reference is None or not (math.isfinite(number) and math.isfinite(reference)):
        return math.inf
    return abs(number - reference) / max(abs(reference), abs(number))


def _distance(of_ranks: Sequence[Mapping[str, Sequence[float]]]) -> tuple[float, str]:
    """Return the relative difference of all weights, and the weight with the largest part in it."""
    squares: dict[str, list[float]] = {}
    for line in of_ranks:
        for name, sums in line.items():
            total = squares.setdefault(name, [0.0, 0.0])
            total[0], total[1] = total[0] + sums[0], total[1] + sums[1]
    difference, norm = (sum(sums[index] for sums in squares.values()) for index in (0, 1))
    worst = max(squares, key=lambda name: squares[name][0], default="")
    if not difference:  # NaN counts as a difference
        return 0.0, worst
    return (math.sqrt(difference / norm) if norm and math.isfinite(difference) else math.inf), worst


def _against_checkpoint(of_ranks: Sequence[Mapping[str, Any]], checkpoint: CheckpointPaths) -> Place | None:
    """Return the tensors that differ from those of a replay; None for another number of ranks."""
    step = checkpoint.step
    if Manifest.read(checkpoint).world_size != len(of_ranks):
        return None
    try:
        shards = [shard_digests(checkpoint.shard(rank)) for rank in range(len(of_ranks))]
    except BadFileError as error:
        say(str(error))
        return place(step, "checkpoint", num_tensors=1, num_compared=1)
    replayed = [
        {"tensors": {name: line["tensors"].get(name) for name in line["tensors"] if name in shard}}
        for line, shard in zip(of_ranks, shards, strict=True)
    ]
    saved = [{"tensors": shard} for shard in shards]
    places = tensor_places(step, "checkpoint", replayed, saved)
    return next(places, place(step, "checkpoint"))


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
        lines.append(f"  {where['num_tensors']} of {where['num_compared']} tensors differ: {tensors}")
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
        "record": f"the numbers of {name} are not those of the replay; no checkpoint shows the tensor",
    }
    if where["where"] == "before" and not where["module"]:
        return "the inputs of the model after normalization and mixing; those of the data are the same"
    return texts[where["where"]]


def _samples(indices: object) -> str:
    names = list(map(str, indices)) if isinstance(indices, list) else []
    return listed(names, _SHOWN_SAMPLES) or "none"


def reproduction_text(answer: Reproduction) -> str:
    """Return the line about a run and its own replay."""
    start = f"checkpoint {answer['checkpoint']}" if answer["checkpoint"] else "the start"
    head = f"{answer['run']}: its replay from {start} on {counted(answer['ranks'], 'rank')}"
    if answer["is_reproducible"] is None:
        return f"{head} can't be compared: the run has no digests and no checkpoint of these steps"
    same = [counted(answer["compared"], "step")] if answer["compared"] else []
    if equal := answer["equal_checkpoints"]:
        same.append(f"checkpoint{'s' * (len(equal) > 1)} {listed(list(map(str, equal)), _SHOWN_SAMPLES)}")
    text = f"{head} is bitwise identical: {', '.join(same)}" if same else f"{head} differs from the run"
    if answer["is_reproducible"]:
        return text
    others = []
    if answer["first_difference"] is not None:
        others.append(f"step {answer['first_difference']} ({labels(answer['differs'])})")
    if answer["other_checkpoint"] is not None:
        others.append(f"checkpoint {answer['other_checkpoint']}")
    return f"{text}{' up to' if same else ' at'} {', '.join(others)}, so the run is not reproducible here"


def labels(names: Sequence[str]) -> str:
    """Return ``loss, gradient norm``."""
    return ", ".join(_LABELS[name] for name in names)
