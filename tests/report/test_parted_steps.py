"""Two replays part at the first value that differs, in the order in which a step computes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from hpc_train.report.parted_steps import Place, first_step, parted_at, place, place_text
from hpc_train.report.reproduction import near, reproduction, reproduction_text
from hpc_train.run.digests import PartDigest, part_digests, part_id
from tests.run.runs import small_run
from tests.run.test_checkpoints import begin_attempt, write_checkpoint

STEP = 7
Ranks = list[dict[str, Any]]


def line(step: int, rank: int) -> dict[str, Any]:
    """Return a rank's line of two ranks under DDP, each with one micro-batch."""
    events = [[rank, "input", "", "a"], [rank, "output", "a", "b"], [rank, "output", "", "c"]]
    batch = {"number": rank, "loss": 1.5, "samples": [rank, 9], "files": [], "inputs": "i", "targets": "t"}
    tensors = {"model.a.weight": "w", "model.a.mean": "m", "optimizer.a.weight.exp_avg": "e"}
    digest = {"samples": "0a", "loss": 1.5, "grad_norm": 2.0, "attempt": 0}
    return {
        "step": step,
        "state": "s",
        "tensors": dict(tensors),
        "micro_batches": [batch],
        "events": [*events, [rank, "backward", "", "d"], [rank, "backward", "a", "e"]],
        "gradients": {"a.weight": "g", "b.weight": "h"},
        "learning_rate": 0.1,
        **({"digest": digest, "recorded": {**digest, "attempt": 1}} if rank == 0 else {}),
    }


def lines() -> dict[int, Ranks]:
    return {step: [line(step, rank) for rank in (0, 1)] for step in (STEP - 1, STEP)}


def event(rank: int, index: int) -> Callable[[dict[int, Ranks]], None]:
    def change(of: dict[int, Ranks]) -> None:
        of[STEP][rank]["events"][index][3] = "other"

    return change


def value(key: str, name: str, ranks: tuple[int, ...] = (0, 1), step: int = STEP) -> Any:
    def change(of: dict[int, Ranks]) -> None:
        for rank in ranks:
            of[step][rank][key][name] = "other"

    return change


def number(key: str, name: str, changed: Any, rank: int = 0) -> Any:
    def change(of: dict[int, Ranks]) -> None:
        numbers = of[STEP][rank][key]
        (numbers[0] if isinstance(numbers, list) else numbers)[name] = changed

    return change


def rate(of: dict[int, Ranks]) -> None:
    of[STEP][0]["learning_rate"] = 0.2


#: In the order of a step: each also hides those below it.
FAULTS: list[tuple[Any, dict[str, Any], str]] = [
    (
        value("tensors", "model.a.mean", (1,), STEP - 1),
        {"where": "state", "tensor": "model.a.mean", "rank": 1, "num_tensors": 1},
        "first difference: step 7, rank 1 (n1 in A, n2 in B)\n  model.a.mean already differs",
    ),
    (
        number("micro_batches", "samples", [3, 4], rank=1),
        {"where": "samples", "micro_batch": 1, "rank": 1, "values": [[1, 9], [3, 4]]},
        "micro-batch 1, rank 1 (n1 in A, n2 in B)\n  other samples: 1, 9 and 3, 4",
    ),
    (
        number("micro_batches", "inputs", "other"),
        {"where": "inputs", "micro_batch": 0, "values": [[0, 9], [0, 9]]},
        "other inputs of the same samples, 0, 9: files",
    ),
    (
        number("micro_batches", "targets", "other"),
        {"where": "targets", "micro_batch": 0},
        "other targets of the same samples, 0, 9",
    ),
    (event(0, 0), {"where": "before", "module": "", "micro_batch": 0}, "after normalization and mixing"),
    (event(0, 1), {"where": "forward", "module": "a", "rank": 0}, "the output of a; its inputs are the same"),
    (number("micro_batches", "loss", 1.25), {"where": "loss", "values": [1.5, 1.25]}, "1.5 and 1.25"),
    (event(0, 4), {"where": "backward", "module": "a", "micro_batch": 0}, "the gradient of the output of a"),
    (event(1, 1), {"where": "forward", "module": "a", "micro_batch": 1, "rank": 1}, "micro-batch 1, rank 1"),
    (
        value("gradients", "a.weight"),
        {"where": "gradients", "tensor": "a.weight", "module": "a", "rank": None, "num_compared": 2},
        "the gradient of a.weight; samples and losses are the same",
    ),
    (rate, {"where": "learning_rate", "values": [0.1, 0.2]}, "the learning rate, 0.1 and 0.2"),
    (number("digest", "grad_norm", 3.0), {"where": "grad_norm", "values": [2.0, 3.0]}, "2.0 and 3.0"),
    (
        value("tensors", "optimizer.a.weight.exp_avg"),
        {"where": "update", "tensor": "optimizer.a.weight.exp_avg", "module": "a"},
        "the update of optimizer.a.weight.exp_avg",
    ),
    (
        value("tensors", "model.a.weight"),
        {"where": "update", "tensor": "model.a.weight", "num_tensors": 1},
        "the update of model.a.weight",
    ),
]


@pytest.mark.parametrize("index", range(len(FAULTS)))
def test_the_first_value_that_differs_is_the_place(index: int) -> None:
    first = lines()
    for hides_later in (False, True):
        second = copy.deepcopy(first)
        for change, _, _ in FAULTS[index:] if hides_later else FAULTS[index : index + 1]:
            change(second)
        answer = parted_at(STEP, first, second, has_same_layout=True)
        _, expected, text = FAULTS[index]
        facts = {key: each for key, each in expected.items() if not (hides_later and key == "num_tensors")}
        assert answer is not None and answer == {**answer, "step": STEP, **facts}
        answer["nodes"] = ["n1", "n2"]
        assert text in "\n".join(place_text(answer, ["A", "B"]))


def test_values_of_modules_are_compared_only_if_both_runs_have_them() -> None:
    first, second = lines(), lines()
    second[STEP][0]["events"] = []  # compiled
    assert parted_at(STEP, first, second, has_same_layout=True) is None
    number("micro_batches", "loss", 1.25)(second)
    answer = parted_at(STEP, first, second, has_same_layout=True)
    assert answer is not None and (answer["where"], answer["micro_batch"]) == ("loss", 0)
    text = "\n".join(place_text(answer, ["A", "B"]))
    assert "samples, inputs and targets are the same. Values of modules are not compared" in text


def test_equal_replays_and_other_layouts_have_no_place() -> None:
    first, second = lines(), lines()
    assert first_step(first, second, has_same_layout=True) is None
    assert parted_at(STEP, first, second, has_same_layout=True) is None
    second[STEP][1]["state"] = "other"
    assert first_step(first, second, has_same_layout=True) == STEP
    assert first_step(first, second, has_same_layout=False) is None
    value("tensors", "model.a.weight")(second)
    assert parted_at(STEP, first, second, has_same_layout=False) is None
    second[STEP][0]["digest"]["loss"] = float("nan")
    assert first_step(first, second, has_same_layout=False) == STEP
    answer = parted_at(STEP, first, second, has_same_layout=False)
    assert answer is not None and answer["values"] == [1.5, None], "JSON has no NaN"


def test_modules_in_other_orders_part_at_the_first_one() -> None:
    first, second = lines(), lines()
    del second[STEP][0]["events"][1:3]
    answer = parted_at(STEP, first, second, has_same_layout=True)
    assert answer is not None and (answer["where"], answer["module"]) == ("loss", None)
    answer = parted_at(STEP, second, first, has_same_layout=True)
    assert answer is not None and (answer["where"], answer["module"]) == ("forward", "a")


def saved(tmp_path: Path) -> tuple[Any, dict[int, Ranks]]:
    """Return a run with a checkpoint of two ranks, and lines of its replay."""
    run = small_run(tmp_path / "runs")
    begin_attempt(run, 1)
    checkpoint = write_checkpoint(run, STEP, attempt=1)
    first = {"model.a.weight": torch.arange(3.0)}
    second = {"model.a.mean": torch.ones(2), "optimizer.a.weight.exp_avg": torch.zeros(3)}
    save_file(first, checkpoint.shard(0))
    save_file(second, checkpoint.shard(1))
    hashes = {name: xxhash.xxh3_64_hexdigest(t.numpy().tobytes()) for name, t in (first | second).items()}
    replay = lines()
    for ranks in replay.values():
        for of_rank in ranks:
            of_rank["tensors"] |= hashes
    return {STEP: checkpoint}, replay


def test_a_run_is_compared_with_its_replay(tmp_path: Path) -> None:
    checkpoints, replay = saved(tmp_path)
    answer, where = reproduction("A", checkpoints, replay, STEP - 2, {})
    assert (answer["is_reproducible"], answer["compared"], answer["equal_checkpoints"]) == (True, 2, [STEP])
    assert where is None
    assert reproduction_text(answer).endswith("2 ranks is bitwise identical: 2 steps, checkpoint 7")
    replay[STEP][1]["tensors"]["optimizer.a.weight.exp_avg"] = "other"
    replay[STEP][0]["digest"]["loss"] = 1.25
    answer, where = reproduction("A", checkpoints, replay, STEP - 2, {})
    assert (answer["is_reproducible"], answer["first_difference"]) == (False, STEP)
    assert answer["differs"] == ["loss"]
    tensor = "optimizer.a.weight.exp_avg"
    expected: Place = place(STEP, "checkpoint", run="A", tensor=tensor, module="a", rank=1)
    assert where is not None and where == {**where, **{key: each for key, each in expected.items() if each}}
    text = reproduction_text(answer | {"compared": 0})
    assert "at step 7 (loss), checkpoint 7, so the run is not reproducible here" in text
    checkpoints[STEP].shard(0).write_bytes(b"damaged")
    _, where = reproduction("A", checkpoints, replay, STEP - 2, {})
    assert where is not None and (where["where"], where["tensor"]) == ("checkpoint", None)
    for ranks in replay.values():
        ranks[0]["recorded"] = None
    answer, where = reproduction("A", {}, replay, STEP - 2, {})
    assert answer["is_reproducible"] is None and where is None
    assert "can't be compared: the run has no digests" in reproduction_text(answer)


def test_recorded_parts_name_the_module_that_differs() -> None:
    replay = lines()
    sums = [part_digests(of_rank["tensors"], rank)["a"] for rank, of_rank in enumerate(replay[STEP])]
    weights, optimizer = (sum(digests) % 2**64 for digests in zip(*sums, strict=True))
    recorded = {STEP: {part_id("a"): PartDigest(STEP, part_id("a"), weights, optimizer, ranks=2)}}
    answer, where = reproduction("A", {}, replay, STEP - 2, recorded)
    assert (answer["equal_parts"], answer["other_parts"], where) == (1, None, None)
    assert "2 steps, parts after 1 step" in reproduction_text(answer)
    replay[STEP][1]["tensors"]["optimizer.a.weight.exp_avg"] = "other"
    answer, where = reproduction("A", {}, replay, STEP - 2, recorded)
    assert (answer["other_parts"], answer["is_reproducible"]) == (STEP, False)
    expected = {"step": STEP, "where": "part", "module": "a", "tensor": "optimizer state of a"}
    assert where is not None and where == {**where, **expected}
    text = "the optimizer state of a in A after the step; its replay has others"
    assert text in place_text(where, ["A"])[1]
    del replay[STEP][1]
    assert reproduction("A", {}, replay, STEP - 2, recorded)[0]["other_parts"] is None, "of two ranks"


@pytest.mark.parametrize(
    ("tolerance", "loss", "weights", "differs"),
    [
        (0.01, 1.5, 0.0, None),
        (0.01, 1.51, 1e-6, None),
        (0.001, 1.51, 0.0, "record"),
        (0.01, 1.5, 0.04, "checkpoint"),
        (0.01, float("nan"), 0.0, "record"),
        (0.01, 1.5, float("nan"), "checkpoint"),
    ],
)
def test_a_tolerance_is_relative(
    tolerance: float, loss: float, weights: float, differs: str | None, tmp_path: Path
) -> None:
    checkpoints, replay = saved(tmp_path)
    replay[STEP][0]["digest"] = {**replay[STEP][0]["digest"], "loss": loss}
    replay[STEP][0]["distances"] = {"model.a.weight": [weights, 3.0], "model.a.mean": [0.0, 1.0]}
    replay[STEP][1]["distances"] = {"model.b.weight": [0.0, 4.0]}
    answer, where, distance = near("A", checkpoints, replay, STEP - 2, tolerance)
    assert (where and where["where"]) == differs and answer["is_reproducible"] == (differs is None)
    expected = max(abs(loss - 1.5) / 1.51, (weights / 8) ** 0.5)
    is_number = loss == loss and weights == weights
    assert distance == (pytest.approx(expected) if is_number else float("inf"))
    if differs == "checkpoint":
        assert where is not None and where["tensor"] == "model.a.weight"


def test_zeros_of_both_signs_are_near_but_not_bitwise_equal() -> None:
    replay = lines()
    for key, loss in (("digest", 0.0), ("recorded", -0.0)):
        replay[STEP][0][key] = {**replay[STEP][0][key], "loss": loss}
    answer, where, distance = near("A", {}, replay, STEP - 2, 0.0)
    assert (answer["is_reproducible"], answer["compared"], where, distance) == (True, 2, None, 0.0)
    answer, where = reproduction("A", {}, replay, STEP - 2, {})
    assert (answer["first_difference"], answer["differs"]) == (STEP, ["loss"]) and where is not None
