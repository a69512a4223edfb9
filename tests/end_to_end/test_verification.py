"""``recovery.verify_every_steps`` changes no bit of a run, and names the rank that computed another one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hpc_train.run.attempts import exit_codes, read_record
from hpc_train.run.checkpoints import Manifest, committed
from tests.datasets.sources.masks import write_folder
from tests.end_to_end.flips import FLIP, FLIPS_ON, FLIPS_ONCE
from tests.end_to_end.runs import (
    EXPERIMENT,
    assert_equal_to_the_bit,
    hpc_train,
    only_run,
    write_experiment,
)
from tests.end_to_end.test_segmentation import CLASSES
from tests.end_to_end.test_segmentation import EXPERIMENT as SEGMENTATION
from tests.quiet import QuietRuns

pytestmark = pytest.mark.slow

STEPS = 20
TEXT = (
    EXPERIMENT.replace("tests.end_to_end.parts:net", "tests.end_to_end.flips:net")
    .replace("every_steps: 7", "every_steps: 3")
    .replace("steps: 30", f"steps: {STEPS}")
    .replace("warmup_steps: 20", "warmup_steps: 5")
)
KEY = "recovery.verify_every_steps"


@pytest.mark.parametrize(
    ("strategy", "ranks", "every"),
    [
        ("zero1", 2, 7),
        # Below, runs with a flipped bit equal those that are not verified, on one rank and on three.
        pytest.param("ddp", 3, 2, marks=pytest.mark.soak),
        pytest.param("ddp", 1, 1, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_verified_run_is_bitwise_identical(
    strategy: str, ranks: int, every: int, quiet_runs: QuietRuns
) -> None:
    """With dropout, BatchNorm and, on three ranks, spare slots."""
    words = (f"parallel.strategy={strategy}",)
    verified = quiet_runs.of(*words, f"{KEY}={every}", text=TEXT, ranks=ranks)
    assert_equal_to_the_bit(quiet_runs.of(*words, text=TEXT, ranks=ranks), verified)
    assert Manifest.read(committed(verified)[0]).verified == STEPS, "compared after the last step, too"


def test_micro_batches_of_unequal_weight_are_verified(quiet_runs: QuietRuns, tmp_path: Path) -> None:
    """Pixels without a class have no weight; ranks have loader processes."""
    root = write_folder(tmp_path, num_classes=CLASSES, train=14, val=5)
    text = SEGMENTATION.replace("ROOT", str(root))
    verified = quiet_runs.of(f"{KEY}=1", "data.workers=1", text=text)
    assert_equal_to_the_bit(quiet_runs.of(text=text), verified)


@pytest.mark.parametrize(
    ("kind", "number", "rank", "ranks", "every"),
    [
        pytest.param("gradient", 1, 1, 3, 1, marks=pytest.mark.soak),
        ("backward", 2, 1, 3, 1),  # while it repeats rank 2's
        ("output", 1, 1, 2, 1),
        ("weight", 1, 1, 3, 4),
        ("gradient", 3, 0, 1, 1),
    ],
)
def test_one_flipped_bit_is_noticed_and_undone(
    kind: str, number: int, rank: int, ranks: int, every: int, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    step = random.randint(2, STEPS - 2)
    module = "head" if kind == "gradient" else "stem"
    flip = {
        FLIP: f"{kind}:{step}:{number}:{module}:18",
        FLIPS_ON: str(rank),
        FLIPS_ONCE: str(tmp_path / "flipped"),
    }
    devices = ("--local", "--devices", str(ranks))
    runs = {"HPC_TRAIN_RUNS": str(tmp_path / "runs")}
    done = hpc_train("submit", write_experiment(tmp_path, TEXT), f"{KEY}={every}", *devices, **flip, **runs)
    paths = only_run(tmp_path)
    if done.code:  # else it restarted in place, since it had saved a new checkpoint
        assert hpc_train("resume", paths.folder, **flip).code == 0
    first, second = (read_record(paths.attempt(number)) for number in (1, 2))
    assert first is not None and second is not None and first.cause == "bad node", first
    reason = first.reason or ""
    assert f" failed its check: rank {rank} computed wrong numbers" in reason, reason
    assert exit_codes(paths.attempt(1)) == {one: 78 if one == rank else 76 for one in range(ranks)}
    assert any(f"in step {at}: " in reason for at in range(step, step + every)), (step, reason)
    trusted = int(second.checkpoints[0].removeprefix("step-")) if second.checkpoints else 0
    assert step - every - 3 <= trusted < step, (step, trusted)
    assert_equal_to_the_bit(quiet_runs.of(text=TEXT, ranks=ranks), paths)
