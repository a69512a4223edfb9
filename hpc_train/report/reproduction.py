"""A run against its own replay: whether it is reproducible, and the first difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

from hpc_train.console import columns, say
from hpc_train.errors import BadFileError, counted, listed
from hpc_train.paths import CheckpointPaths
from hpc_train.report import parted_steps
from hpc_train.report.parted_steps import MAX_NAMES, Lines, Place, place, step_digest
from hpc_train.report.replayed_steps import StepNumbers
from hpc_train.run.checkpoints import Manifest
from hpc_train.run.digests import PartDigest, module_of, part_digests, part_id, shard_digests

#: Step → the digests that the run recorded, by the number of the part.
Parts = Mapping[int, Mapping[int, PartDigest]]
#: Checkpoints and stretches that the text names.
_SHOWN = 6
#: Of several differences of a step, the one that says most is the place.
_WHERE = ("checkpoint", "part", "record")
#: Results of a stretch after which ``verify`` exits with 1.
FAILURES = ("differs", "failed")


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
    #: The number of steps whose digests of parts were equal, and the first step whose are not.
    equal_parts: int
    other_parts: int | None


class VerifiedStretch(TypedDict):
    """The steps from one checkpoint to the next, repeated and compared with the run."""

    first: int
    last: int
    #: ``identical``; ``close``: within ``tolerance``; ``differs``; ``failed``: no replay; ``unknown``: the
    #: run has neither digests nor a checkpoint to compare these steps with.
    result: str
    #: 0: bitwise.
    tolerance: float
    #: The largest relative difference of losses, gradient norms and weights; null: compared bitwise.
    distance: float | None
    #: Null if the replay failed.
    reproduction: Reproduction | None
    #: Null: none.
    first_difference: Place | None
    #: The digests of the first step that differs, in the run and in its replay; empty without any.
    numbers: list[StepNumbers]
    #: The node that trained the last step; null if there are several.
    node: str | None
    #: The node that repeated them, and their slot there, from 1 on.
    host: str
    slot: int
    seconds: float | None


def reproduction(
    run: str, checkpoints: Mapping[int, CheckpointPaths], lines: Lines, begin: int, parts: Parts
) -> tuple[Reproduction, Place | None]:
    """Return the comparison of a run with its replay, and their first difference.

    ``checkpoints`` and ``parts``: of the run. The replay has digests of the tensors at their steps.
    """
    answer, places, _ = _steps_compared(run, lines, begin, -1.0)
    for step, checkpoint in checkpoints.items():
        compared = _against_checkpoint(lines[step], checkpoint) if begin < step in lines else None
        if compared is not None and compared["num_tensors"]:
            answer["other_checkpoint"] = step
            places.append(compared)
            break
        if compared is not None:
            answer["equal_checkpoints"].append(step)
    for step, of_step in parts.items():
        compared = _against_parts(step, lines[step], of_step) if begin < step in lines else None
        if compared is not None and compared["num_tensors"]:
            answer["other_parts"] = step
            places.append(compared)
            break
        answer["equal_parts"] += compared is not None
    return answer, _first_of(places, answer)


def near(
    run: str, checkpoints: Mapping[int, CheckpointPaths], lines: Lines, begin: int, tolerance: float
) -> tuple[Reproduction, Place | None, float]:
    """Return the same comparison with a tolerance, and the largest relative difference.

    Of the loss, the gradients' norm, and the norm of all weights at a checkpoint; samples must be the same.
    """
    answer, places, largest = _steps_compared(run, lines, begin, tolerance)
    for step in (step for step in checkpoints if begin < step in lines and "distances" in lines[step][0]):
        distance, tensor = _distance([line["distances"] for line in lines[step]])
        largest = max(largest, distance)
        if distance > tolerance:
            answer["other_checkpoint"] = step
            module = module_of(tensor)
            places.append(place(step, "checkpoint", module=module, tensor=tensor, num_compared=1))
            break
        answer["equal_checkpoints"].append(step)
    return answer, _first_of(places, answer), largest


def _steps_compared(
    run: str, lines: Lines, begin: int, tolerance: float
) -> tuple[Reproduction, list[Place], float]:
    """Compare the steps' digests up to the first that differs; also return the largest relative difference.

    ``tolerance``: if negative, numbers must be bitwise identical; samples always.
    """
    facts = {"run": run, "checkpoint": begin, "ranks": len(next(iter(lines.values()))), "compared": 0}
    empty = {"differs": [], "equal_checkpoints": [], "equal_parts": 0}
    answer = cast("Reproduction", dict.fromkeys(Reproduction.__annotations__) | facts | empty)
    places: list[Place] = []
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
    return answer, places, largest


def _first_of(places: Sequence[Place], answer: Reproduction) -> Place | None:
    """Return the first place, and complete ``answer``."""
    if answer["compared"] or answer["equal_checkpoints"] or answer["equal_parts"] or places:
        answer["is_reproducible"] = not places
    first = min(places, key=lambda one: (one["step"], _WHERE.index(one["where"])), default=None)
    if first is not None:
        first["run"] = answer["run"]
    return first


def _relative(number: float | None, reference: float | None) -> float:
    """Return the relative difference; infinite if one of the numbers is not finite."""
    if number is None or reference is None or not (math.isfinite(number) and math.isfinite(reference)):
        return math.inf
    return abs(number - reference) / (max(abs(reference), abs(number)) or 1.0)  # 0.0 and -0.0


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
    places = parted_steps.tensor_places(step, "checkpoint", replayed, saved)
    return next(places, place(step, "checkpoint"))


def _against_parts(
    step: int, of_ranks: Sequence[Mapping[str, Any]], recorded: Mapping[int, PartDigest]
) -> Place | None:
    """Return the digests of parts that differ from those of a replay; None for another number of ranks."""
    if any("tensors" not in line for line in of_ranks) or {part.ranks for part in recorded.values()} != {
        len(of_ranks)
    }:
        return None
    sums: dict[str, tuple[int, int]] = {}
    for rank, line in enumerate(of_ranks):
        for part, digests in part_digests(line["tensors"], rank).items():
            before = sums.get(part, (0, 0))
            sums[part] = (before[0] + digests[0]) % 2**64, (before[1] + digests[1]) % 2**64
    names, modules = [], []
    for part, digests in sums.items():
        saved = recorded.get(part_id(part))
        for kind in [] if saved is None else saved.differences(PartDigest(step, 0, *digests)):
            names.append(f"{kind} of {part or 'the model'}")
            modules.append(part)
    if not names:
        return place(step, "part")
    facts = {"tensor": names[0], "tensors": names[:MAX_NAMES], "num_tensors": len(names)}
    return place(step, "part", module=modules[0], num_compared=2 * len(sums), **facts)


def reproduction_text(answer: Reproduction) -> str:
    """Return the line about a run and its own replay."""
    start = f"checkpoint {answer['checkpoint']}" if answer["checkpoint"] else "the start"
    head = f"{answer['run']}: its replay from {start} on {counted(answer['ranks'], 'rank')}"
    if answer["is_reproducible"] is None:
        return f"{head} can't be compared: the run has no digests and no checkpoint of such steps and ranks"
    same = [counted(answer["compared"], "step")] if answer["compared"] else []
    if equal := answer["equal_checkpoints"]:
        same.append(f"checkpoint{'s' * (len(equal) > 1)} {listed(list(map(str, equal)), _SHOWN)}")
    if answer["equal_parts"]:
        same.append(f"parts after {counted(answer['equal_parts'], 'step')}")
    text = f"{head} is bitwise identical: {', '.join(same)}" if same else f"{head} differs from the run"
    if answer["is_reproducible"]:
        return text
    others = []
    if answer["first_difference"] is not None:
        others.append(f"step {answer['first_difference']} ({parted_steps.labels(answer['differs'])})")
    if answer["other_checkpoint"] is not None:
        others.append(f"checkpoint {answer['other_checkpoint']}")
    if answer["other_parts"] is not None:
        others.append(f"parts after step {answer['other_parts']}")
    return f"{text}{' up to' if same else ' at'} {', '.join(others)}, so the run is not reproducible here"


_RESULTS = {
    "identical": "bitwise identical",
    "failed": "the replay failed",
    "unknown": "nothing to compare with",
}


def stretches_text(stretches: Sequence[VerifiedStretch], seconds: float, name: str) -> list[str]:
    """Return a row per stretch, then the first difference."""
    rows = [["steps", "result", "node", "time"]]
    for stretch in stretches:
        took = "" if stretch["seconds"] is None else f"{stretch['seconds']:.1f} s"
        rows.append([_steps(stretch), _result(stretch), stretch["node"] or "several", took])
    bad = [stretch for stretch in stretches if stretch["result"] in FAILURES]
    total = f"{counted(len(stretches), 'stretch')}, {seconds:.1f} s"
    lines = columns(rows)
    if not bad:
        return [*lines, f"{name}: no difference in {total}"]
    lines.append(
        f"{name}: differences in {len(bad)} of {total}: steps {listed(list(map(_steps, bad)), _SHOWN)}"
    )
    first = bad[0]
    if first["first_difference"] is not None:
        lines += parted_steps.place_text(first["first_difference"], [name])
        lines.append(f"to look closer: hpc-train bisect {name} --from {first['first']} --to {first['last']}")
    return lines


def _steps(stretch: VerifiedStretch) -> str:
    return f"{stretch['first']} to {stretch['last']}"


def _result(stretch: VerifiedStretch) -> str:
    if stretch["result"] == "close":
        return f"within {stretch['tolerance']:g}: differs by {stretch['distance']:.1e}"
    difference = stretch["first_difference"]
    if difference is None:
        return _RESULTS[stretch["result"]]
    distance = stretch["distance"]
    by = f" by {distance:.1e}" if distance is not None else ""
    return f"differs{by} at step {difference['step']}"
