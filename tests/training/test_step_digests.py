"""The digests of training steps: any changed bit shows, at its step, and the ranks do not matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from hpc_train.experiment.config.schema import CheckpointConfig
from hpc_train.paths import RunPaths
from hpc_train.run.digests import PartDigest, StepDigest, part_digests, part_id, read_digests, read_parts
from hpc_train.training import state_digests
from hpc_train.training.datasets.sampler import MicroBatchSampler, Position
from hpc_train.training.datasets.types import Batch
from hpc_train.training.state_digests import PartDigests
from hpc_train.training.step import StepResult
from hpc_train.training.step_digests import EVERY_STEPS, StepDigests, digest_files, samples_digest
from tests.ranks import run_ranks
from tests.training.test_step import Training, micro_batches

CPU = torch.device("cpu")


class Collected:
    """Keeps digests in place of a file."""

    def __init__(self) -> None:
        self.digests: list[Any] = []

    def append(self, digests: Sequence[Any]) -> None:
        self.digests += digests

    def sync(self) -> None:
        raise AssertionError("nothing saves")


def batches_of(step: int, rank: int, ranks: int) -> list[Batch]:
    """Return the micro-batches of a rank as a loader would, without their content."""
    sampler = MicroBatchSampler(
        50,
        global_batch_size=12,
        micro_batch_size=2,
        seed=1,
        position=Position(step),
        total_steps=step + 1,
        rank=rank,
        world_size=ranks,
    )
    empty = torch.zeros(0)
    return [
        Batch(
            slot.step, slot.number, slot.weight, empty, empty, empty, samples=slot.indices.numpy().tobytes()
        )
        for slot in sampler
    ]


def test_the_samples_do_not_depend_on_the_ranks() -> None:
    """Spare slots, of four ranks for six micro-batches, do not count."""
    digests = {
        ranks: [
            sum(samples_digest(batches_of(step, rank, ranks)) for rank in range(ranks)) % 2**64
            for step in range(5)
        ]
        for ranks in (1, 2, 4, 6)
    }
    assert digests[1] == digests[2] == digests[4] == digests[6] and len(set(digests[1])) == 5


@pytest.mark.parametrize("change", ["index", "order", "micro-batch"])
def test_other_samples_have_another_digest(change: str) -> None:
    batches = batches_of(0, 0, 1)
    first, second = batches[:2]
    indices = torch.tensor(first.indices)
    if change == "index":
        indices[0] += 1
    elif change == "order":
        indices = indices.flip(0)
    else:
        batches[0], batches[1] = (
            replace(first, samples=second.samples),
            replace(second, samples=first.samples),
        )
    if change != "micro-batch":
        batches[0] = replace(first, samples=indices.numpy().tobytes())
    assert samples_digest(batches) != samples_digest(batches_of(0, 0, 1))


def trained(changed_at: int | None = None, what: str = "weight") -> list[StepDigest]:
    """Train six steps; flip the last bit of one number before step ``changed_at``."""
    training, collected = Training(), Collected()
    digests = StepDigests(collected, 1, owns_loss=True)

    class Observer(StepDigests):
        def gradients_ready(self, step: int, batches: Sequence[Batch], forward: Any) -> None:
            if step == changed_at and what == "gradient":
                flip(next(training.model.parameters()).grad)

    digests.__class__ = Observer
    for step in range(6):
        if step == changed_at and what == "weight":
            flip(next(training.model.parameters()))
        if step == changed_at and what == "moment":
            optimizer = training.state.optimization.optimizer
            flip(next(iter(optimizer.state.values()))["exp_avg"], bit=12)  # rounding absorbs the last one
        training.step(step, observers=[digests])
    digests.exchange()
    return collected.digests


@torch.no_grad()
def flip(tensor: Tensor | None, bit: int = 0) -> None:
    """Change a bit of the number of the largest magnitude; 0: the last one."""
    assert tensor is not None
    bits = tensor.view(torch.int32).view(-1)
    bits[tensor.abs().argmax()] ^= 1 << bit


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize(("what", "delay"), [("weight", 0), ("gradient", 0), ("moment", 1)])
def test_a_changed_bit_shows_at_its_step(what: str, delay: int) -> None:
    before, after = trained(), trained(3, what)
    differing = [one.step for one, other in zip(before, after, strict=True) if one.differences(other)]
    assert trained() == before and len(before) == 6
    # A moment changes the weights in its step, which the next step's loss shows; steps count from 1.
    assert min(differing) == 4 + delay


@pytest.mark.usefixtures("one_rank_group")
def test_digests_are_written_when_they_are_exchanged() -> None:
    collected = Collected()
    digests = StepDigests(collected, 7, owns_loss=True)
    result = StepResult(0.1, torch.tensor(0.5, dtype=torch.float64), None, is_allowed=True)
    for step in range(EVERY_STEPS + 3):
        digests.step_done(step, micro_batches(step), result)
    assert [digest.step for digest in collected.digests] == list(range(1, EVERY_STEPS + 1))
    digests.exchange()
    digests.exchange()
    assert collected.digests[-1] == StepDigest(
        EVERY_STEPS + 3, samples_digest(micro_batches(0)), 0.5, None, attempt=7
    )


def _on_ranks(rank: int, world_size: int) -> list[StepDigest]:
    collected = Collected()
    digests = StepDigests(collected if rank == 0 else None, 1, owns_loss=rank != 1, every_steps=2)
    for step in range(4):
        loss = torch.tensor([1e16, torch.nan, 1.0, -1e16][rank], dtype=torch.float64)
        norm = torch.tensor(step / 3)
        digests.step_done(
            step, batches_of(step, rank, world_size), StepResult(0.1, loss, norm, is_allowed=True)
        )
    return collected.digests


@pytest.mark.slow
def test_losses_are_added_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    """Rank 1 owns no loss. In another order the sum would be 0 or 1."""
    first, *others = run_ranks(4, _on_ranks, folder=tmp_path)
    assert others == [[], [], []] and [digest.step for digest in first] == [1, 2, 3, 4]
    assert {digest.loss for digest in first} == {1e16 + 1.0 - 1e16}
    assert [digest.grad_norm for digest in first] == [float(torch.tensor(step / 3)) for step in range(4)]
    owners = (0, 2, 3)
    samples = [sum(samples_digest(batches_of(step, rank, 4)) for rank in owners) for step in range(4)]
    assert [digest.samples for digest in first] == [number % 2**64 for number in samples]


@pytest.mark.parametrize(
    ("mode", "deterministic", "device", "on_spike", "is_on"),
    [
        (None, None, "cpu", None, True),
        (None, None, "cuda", None, False),
        (None, None, "cuda", "report", True),
        (None, True, "cuda", None, True),
        (None, False, "cpu", None, False),
        ("off", None, "cpu", None, False),
        ("steps", False, "cuda", None, True),
    ],
)
def test_the_default_is_that_of_deterministic(
    mode: Any, deterministic: bool | None, device: str, on_spike: str | None, is_on: bool, tmp_path: Path
) -> None:
    """A file of an earlier attempt loses its later digests even if this one has none."""
    keys = {"deterministic": deterministic, "optimization": SimpleNamespace(on_spike=on_spike)}
    config = cast(Any, SimpleNamespace(checkpoint=CheckpointConfig(digests=mode), **keys))
    run = RunPaths(tmp_path)
    assert (digest_files(config, torch.device(device), run, 0) is not None) == is_on
    parts = cast(Any, SimpleNamespace(checkpoint=CheckpointConfig(digests="parts"), deterministic=None))
    files = digest_files(parts, CPU, run, 0)
    assert files is not None and files.parts is not None
    files.steps.append([StepDigest(step, 0, 0.0, None) for step in (1, 2, 3)])
    files.parts.append([PartDigest(step, 5, 0, 0) for step in (1, 2, 3)])
    files.close()
    files = digest_files(config, torch.device(device), run, 2)
    assert files is None or files.parts is None
    assert [digest.step for digest in read_digests(run.digests)] == [1, 2]
    assert [step for step, _ in read_parts(run.part_digests)] == [1, 2]


def parts_of_training(what: str = "", every: int | None = 2, steps: int = 6) -> list[PartDigest]:
    """Train; before the fourth step flip a bit that the next steps hardly show."""
    training, collected = Training(), Collected()
    parts = PartDigests(training.state, collected, 7, every, steps)
    digests = StepDigests(None, 7, owns_loss=True, parts=parts)
    for step in range(steps):
        if step == 3 and what == "moment":
            flip(next(iter(training.state.optimization.optimizer.state.values()))["exp_avg"])
        if step == 3 and what == "average":
            assert training.state.ema is not None
            flip(next(iter(training.state.ema.averages.values())), bit=9)
        training.step(step, observers=[digests])
    return collected.digests


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize(("what", "kind"), [("moment", "optimizer state"), ("average", "weights")])
def test_a_changed_bit_of_the_state_shows_in_its_module(what: str, kind: str) -> None:
    before, after = parts_of_training(), parts_of_training(what)
    assert before == parts_of_training() and {digest.step for digest in before} == {2, 4, 6}
    assert {(digest.attempt, digest.ranks) for digest in before} == {(7, 1)}
    first = next(one.differences(other) for one, other in zip(before, after, strict=True) if one != other)
    differing = [one for one, other in zip(before, after, strict=True) if one.differences(other)]
    first_module = next(name for name, _ in Training().model.named_parameters()).rpartition(".")[0]
    assert first == [kind] and min(digest.step for digest in differing) == 4
    assert {digest.part for digest in differing if digest.step == 4} == {part_id(first_module)}


@pytest.mark.usefixtures("one_rank_group")
def test_digests_of_parts_become_rarer_until_they_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock: every step takes a second, and an exchange three."""
    clock = [0.0]
    monkeypatch.setattr(state_digests, "PARTS_EVERY", 4)
    monkeypatch.setattr(state_digests.time, "perf_counter", lambda: clock[0])
    exchange = PartDigests._exchange

    def slow(self: PartDigests, *arguments: Any) -> None:
        exchange(self, *arguments)
        clock[0] += 3.0

    monkeypatch.setattr(PartDigests, "_exchange", slow)
    collected = Collected()
    parts = PartDigests(Training().state, collected, 1, None, 4000)
    for step in range(1, 4001):
        clock[0] += 1.0
        parts.step_done(step, torch.zeros(()))
    steps = sorted({digest.step for digest in collected.digests})
    assert steps[:3] == [4, 8, 1024] and parts.every == 1024, "3 s of 1024 are below 0.5 %"
    assert PartDigests(Training().state, None, 1, 1, 3 * state_digests.MAX_PART_STEPS).every == 4


def _parts_of_ranks(rank: int, world_size: int) -> list[PartDigest]:
    collected = Collected()
    parts = PartDigests(Training().state, collected if rank == 0 else None, 1, 1, 4)
    for step in (1, 2):
        parts.step_done(step, torch.zeros(()))
    return collected.digests


@pytest.mark.slow
def test_the_digests_of_all_ranks_are_added_up(tmp_path: Path) -> None:
    first, second = run_ranks(2, _parts_of_ranks, folder=tmp_path)
    assert second == [] and [digest.step for digest in first] == [1, 1, 2, 2]
    expected: dict[int, int] = {}
    for rank in (0, 1):
        tensors = state_digests.tensor_digests(Training().state)
        for part, (weights, _) in part_digests(tensors, rank).items():
            expected[part_id(part)] = (expected.get(part_id(part), 0) + weights) % 2**64
    assert {digest.part: digest.weights for digest in first} == expected
    assert {digest.ranks for digest in first} == {2}
