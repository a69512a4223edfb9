"""A run that continues at another size and under another strategy: the same training but for rounding."""

from __future__ import annotations

import re
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_train.paths import RunPaths
from hpc_train.training.datasets.sampler import MicroBatchSampler, Position
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import (
    EXPERIMENT,
    final_tensors,
    only_run,
    rows,
    start,
    status,
    submit,
    write_experiment,
)
from tests.waiting import HANG_LIMIT_S

pytestmark = pytest.mark.slow

STEPS = 34
#: In float64 rounding stays small. BatchNorm on any number of ranks is compared in tests/parallelism.
#: Dropout before the blocks alone: the later stages of a pipeline draw other numbers.
ELASTIC = (
    EXPERIMENT.replace('parts:net"}', 'paced:vit", args: {dropout: 0.0, stem_dropout: 0.2, depth: 2}}')
    .replace("adamw, lr: 0.003", "sgd, lr: 0.05, momentum: 0.9")
    .replace("steps: 30", f"steps: {STEPS}")
    + "precision: fp64\n"
)
#: 1,437 digits for training, 48 a step.
NUM_SAMPLES, BATCH, MICRO_BATCH = 1437, 48, 12
STEPS_PER_EPOCH = NUM_SAMPLES // BATCH
#: What a run's first rank says as an attempt begins.
SAID = re.compile(
    r"(?P<size>\d+) parameters on (?P<ranks>\d+) × \w+, (?P<strategy>\w+), .* from step (?P<first>\d+) to"
)
#: How many ranks train, by what strategy and with which degrees, one attempt after the other.
WAYS: tuple[tuple[int, str, tuple[str, ...]], ...] = (
    (4, "ddp", ()),
    (2, "fsdp", ()),
    (4, "hsdp", ("parallel.replicate=2", "parallel.shard=2")),
    (2, "tensor", ("parallel.tensor=2", "parallel.replicate=null", "parallel.shard=null")),
    (4, "pipeline", ("parallel.pipeline=2", "parallel.tensor=null", "parallel.shard=2")),
)
#: Of those.
DATA_RANKS = {"ddp": 4, "fsdp": 2, "hsdp": 4, "tensor": 1, "pipeline": 2}


def stop(process: subprocess.Popen[str], paths: RunPaths) -> None:
    """Press Ctrl-C."""
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANG_LIMIT_S)
    assert process.returncode == 130, err
    assert status(paths)["step"] % STEPS_PER_EPOCH != 0, "in the middle of an epoch"


def elastic_run(folder: Path) -> RunPaths:
    """Each of ``WAYS`` for some steps, the last one to the end."""
    runs = {"HPC_TRAIN_RUNS": str(folder / "runs")}
    what: tuple[str | Path, ...] = ("submit", write_experiment(folder, ELASTIC))
    step = 0
    with Hold(folder, step) as hold:
        for ranks, strategy, degrees in WAYS[:-1]:
            # Four times: the last stop, too, is well before the end of the first epoch.
            hold.at(step + 4)
            process = started((*what, hold.override), ranks, strategy, degrees, runs)
            hold.wait(process)
            paths = only_run(folder)
            stop(process, paths)
            step = status(paths)["step"]
            what = ("resume", paths.folder)
    process = started(what, *WAYS[-1], runs)
    _, err = process.communicate(timeout=HANG_LIMIT_S)
    assert process.returncode == 0, err
    return paths


def started(
    what: Sequence[str | Path], ranks: int, strategy: str, degrees: Sequence[str], runs: Mapping[str, str]
) -> subprocess.Popen[str]:
    wanted = (f"parallel.strategy={strategy}", *degrees, "--local", "--devices", str(ranks))
    return start(*what, *wanted, **runs)


@pytest.mark.fault(40)
def test_a_run_continues_at_another_size_and_under_another_strategy(tmp_path: Path) -> None:
    quiet = submit(tmp_path / "quiet", devices=1, text=ELASTIC)
    paths = elastic_run(tmp_path / "elastic")
    told = [(span.ranks, span.strategy) for span in spans(paths)]
    assert told == [(ranks, strategy) for ranks, strategy, _ in WAYS]
    assert_same_metrics(rows(paths), rows(quiet))
    ours, theirs = final_tensors(paths), final_tensors(quiet)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == torch.float64
            torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-9, msg=name)
    assert_every_sample_once(paths)


@dataclass(frozen=True)
class Span:
    """Which steps an attempt trained, by how many ranks and how."""

    ranks: int
    strategy: str
    first: int
    end: int


def spans(paths: RunPaths) -> list[Span]:
    """Return what each attempt's first rank said as it began; each ends where the next one continued."""
    logs = [attempt.log(0).read_text() for attempt in paths.attempt_folders()]
    said = [SAID.search(log) for log in logs]
    assert len({m["size"] for m in said if m}) == 1, "the whole model's parameters, whatever a rank holds"
    found = [(int(m["ranks"]), m["strategy"], int(m["first"])) for m in said if m]
    assert len(found) == len(logs), logs
    assert ["not bitwise" in log for log in logs] == [False] + [True] * (len(logs) - 1)
    ends = [first for _, _, first in found[1:]] + [STEPS]
    return [Span(*each, end) for each, end in zip(found, ends, strict=True)]


def assert_same_metrics(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Each step once, with the same numbers: of the same micro-batches, augmented alike."""
    assert [(row["split"], row["step"]) for row in found] == [(row["split"], row["step"]) for row in expected]
    assert [row["step"] for row in found if row["split"] == "train"] == list(range(1, STEPS + 1))
    for row, other in zip(found, expected, strict=True):
        assert row.keys() == other.keys()
        assert numbers(row) == pytest.approx(numbers(other), rel=0, abs=1e-9)


def numbers(row: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if not isinstance(value, str)}


def assert_every_sample_once(paths: RunPaths) -> None:
    """Ask the sampler what each attempt's ranks read, from its first step."""
    taken: Counter[int] = Counter()
    for span in spans(paths):
        for rank in range(DATA_RANKS[span.strategy]):
            for slot in sampler(span, rank):
                taken.update(slot.indices.tolist() if slot.weight and slot.epoch == 0 else [])
    assert set(taken.values()) == {1} and len(taken) == STEPS_PER_EPOCH * BATCH


def sampler(span: Span, rank: int) -> MicroBatchSampler:
    return MicroBatchSampler(
        NUM_SAMPLES, global_batch_size=BATCH, micro_batch_size=MICRO_BATCH, seed=3,
        position=Position(span.first), total_steps=span.end, rank=rank,
        world_size=DATA_RANKS[span.strategy],
    )  # fmt: skip
