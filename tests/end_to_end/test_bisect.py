"""``bisect`` names the step, and the first module or tensor, at which a fault made two runs differ."""

from __future__ import annotations

import math
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.run.checkpoints import FileEntry, Manifest, hash_file
from tests.cli.json_checks import checked
from tests.end_to_end.flips import FLIP
from tests.end_to_end.runs import EXPERIMENT, hpc_train
from tests.end_to_end.test_evaluate import content
from tests.end_to_end.test_replay import copy_run
from tests.quiet import QuietRuns

pytestmark = pytest.mark.slow

#: Checkpoints 4, 8, 12 and 16, all of them kept.
TEXT = (
    EXPERIMENT.replace("tests.end_to_end.parts:net", "tests.end_to_end.flips:net")
    .replace("steps: 60", "steps: 16")
    .replace("warmup_steps: 20", "warmup_steps: 2")
    .replace("every_steps: 7", "every_steps: 8, keep_every: 4")
)
STEP = 10


def bisected(*words: str | Path, code: int) -> dict[str, Any]:
    done = hpc_train("bisect", *words, "--json")
    assert done.code == code, done.err + done.out
    answer: dict[str, Any] = checked("bisect", done.out)
    return answer


def flip(kind: str, number: int) -> str:
    return f"model.args.flip={kind}:{STEP}:{number}"


#: Changed key → the place. Rank r of 2 trains the micro-batches r and r + 2.
FAULTS: dict[str, dict[str, Any]] = {
    flip("output", 1): {"step": STEP, "where": "forward", "module": "1", "micro_batch": 1, "rank": 1},
    flip("backward", 2): {"step": STEP, "where": "backward", "module": "1", "micro_batch": 2, "rank": 0},
    flip("weight", 3): {"step": STEP, "where": "forward", "module": "0", "micro_batch": 3, "rank": 1},
    flip("gradient", 0): {"step": STEP, "where": "gradients", "tensor": "4.weight", "num_tensors": 1},
    flip("rng", 2): {"step": STEP, "where": "forward", "module": "2.0.dropout", "micro_batch": 2, "rank": 0},
    "seed=4": {"step": 1, "where": "state", "tensor": "model.0.weight", "rank": None},
    "optimization.optimizer.lr=0.004": {"step": 1, "where": "learning_rate"},
    "optimization.optimizer.weight_decay=0.5": {"step": 1, "where": "update", "tensor": "model.0.weight"},
    "data.augment.crop_padding=3": {"step": 1, "where": "inputs", "micro_batch": 0, "rank": 0},
    "optimization.micro_batch_size=24": {"step": 1, "where": "samples", "micro_batch": 0},
}


@pytest.mark.parametrize("change", FAULTS)
def test_a_fault_that_replays_repeat_is_named(change: str, quiet_runs: QuietRuns) -> None:
    run, other = quiet_runs.of(text=TEXT), quiet_runs.of(change, text=TEXT)
    before = content(run), content(other)
    answer = bisected(run.folder, other.folder, code=1)
    expected = FAULTS[change]
    assert answer["place"] == answer["place"] | expected, answer
    assert list(answer["difference"]["settings"]) == [change.partition("=")[0]]
    assert answer["first_difference"] in (expected["step"], expected["step"] + 1)
    assert ("samples" in answer["differs"]) == (expected["where"] == "samples" or "seed" in change)
    assert [one["is_reproducible"] for one in answer["reproduction"]] == [True, True]
    stretch = answer["first_difference"] - (answer["equal_checkpoint"] or 0)
    assert answer["replays"] <= math.ceil(math.log2(stretch)) + 2
    assert len(set(answer["place"]["nodes"])) == 1 and (content(run), content(other)) == before


def test_without_digests_the_step_is_found_between_checkpoints(quiet_runs: QuietRuns) -> None:
    run, other = (
        quiet_runs.of("checkpoint.digests=off", *words, text=TEXT) for words in ((), (flip("gradient", 0),))
    )
    answer = bisected(run.folder, other.folder, code=1)
    assert (answer["compared"], answer["equal_checkpoint"], answer["other_checkpoint"]) == (0, 8, 12)
    assert answer["place"] == answer["place"] | FAULTS[flip("gradient", 0)]
    assert answer["replays"] == 2, "all four steps are traced"


@pytest.mark.parametrize(("digests", "equal", "last", "replays"), [("off", None, 16, 4), ("parts", 8, 10, 2)])
def test_recorded_parts_save_replays(
    digests: str, equal: int | None, last: int, replays: int, quiet_runs: QuietRuns
) -> None:
    """Checkpoints 8 and 16; between them are too many steps to trace."""
    words = ("checkpoint.keep_every=null", f"checkpoint.digests={digests}")
    words += ("checkpoint.parts_every=2",) * (digests == "parts")
    run, other = (quiet_runs.of(*words, *more, text=TEXT) for more in ((), (flip("gradient", 0),)))
    answer = bisected(run.folder, other.folder, code=1)
    assert answer["place"] == answer["place"] | FAULTS[flip("gradient", 0)]
    assert (answer["equal_parts"], answer["other_parts"]) == (equal, last if equal else None)
    assert answer["replays"] == replays, answer["reproduction"]


def test_recorded_parts_show_the_module_of_a_fault_of_the_machine(quiet_runs: QuietRuns) -> None:
    words = ("checkpoint.digests=parts", "checkpoint.parts_every=1", "optimization.clip_grad_norm=null")
    run = quiet_runs.of(*words, text=TEXT, environment={FLIP: f"gradient:{STEP}:1"})
    answer = bisected(run.folder, code=1)
    expected = {"step": STEP, "where": "part", "module": "4", "tensor": "weights of 4", "num_tensors": 2}
    assert answer["place"] == answer["place"] | expected
    assert answer["reproduction"][0]["equal_parts"] == STEP - 1 - 4, "from checkpoint 4 on"


def test_a_fault_of_the_machine_is_told_from_a_changed_run(quiet_runs: QuietRuns) -> None:
    """No replay repeats it: the run's checkpoint is not that of its replay, that of the other run is."""
    words = ("optimization.clip_grad_norm=null", "checkpoint.keep_every=2")
    run = quiet_runs.of(*words, text=TEXT)
    other = quiet_runs.of(*words, text=TEXT, environment={FLIP: f"gradient:{STEP}:1"})
    answer = bisected(run.folder, other.folder, code=1)
    assert (answer["first_difference"], answer["differs"]) == (STEP + 1, ["loss"])
    assert (answer["equal_checkpoint"], answer["other_checkpoint"]) == (STEP - 2, STEP)
    assert [one["is_reproducible"] for one in answer["reproduction"]] == [True, False]
    place = answer["place"]
    assert (place["step"], place["where"]) == (STEP, "checkpoint") and place["tensor"] == "model.4.weight"
    assert place["run"] == str(other.folder) and answer["replays"] == 2
    assert {name.rpartition(".weight")[0] for name in place["tensors"]} == {"model.4", "optimizer.4"}


def test_other_threads_are_named(quiet_runs: QuietRuns) -> None:
    run = quiet_runs.of(text=TEXT)
    other = quiet_runs.of(text=TEXT, environment={"OMP_NUM_THREADS": "2"})
    done = hpc_train("bisect", run.folder, other.folder)
    assert "machine: 1 fact differs\n- threads: [1, 1]\n+ threads: [2, 2]\n" in done.out, done.err
    assert "no key differs" in done.out and "not reproducible" not in done.out


TENSOR = "optimizer.4.weight.exp_avg"


def flip_bit(checkpoint: CheckpointPaths) -> int:
    """Flip a bit of ``TENSOR``; return the rank that saved it."""
    for rank in (0, 1):
        content = bytearray(checkpoint.shard(rank).read_bytes())
        (length,) = struct.unpack("<Q", content[:8])
        name = b'"%s":' % TENSOR.encode()
        if name in content[: 8 + length]:
            offsets = content[content.index(b'"data_offsets":[', content.index(name)) :]
            begin = int(offsets.partition(b"[")[2].partition(b",")[0])
            content[8 + length + begin + 2] ^= 1
            checkpoint.shard(rank).write_bytes(content)
            return rank
    raise AssertionError(TENSOR)


@pytest.mark.parametrize("is_damage", [False, True], ids=["with its hash", "without its hash"])
def test_a_bit_of_a_saved_moment_is_named(is_damage: bool, quiet_runs: QuietRuns, tmp_path: Path) -> None:
    run = quiet_runs.of(text=TEXT)
    copy = RunPaths(tmp_path / "runs" / "digits" / run.folder.name)
    copy.folder.parent.mkdir(parents=True, mode=0o700)
    copy_run(run, copy)
    checkpoint = copy.checkpoint(8)
    rank = flip_bit(checkpoint)
    if not is_damage:
        manifest, shard = Manifest.read(checkpoint), checkpoint.shard(rank)
        entry = FileEntry(shard.stat().st_size, hash_file(shard))
        replace(manifest, files=manifest.files | {shard.name: entry}).write(checkpoint)
    words = (run.folder, copy.folder) if is_damage else (copy.folder,)
    answer = bisected(*words, code=1)
    expected = {"step": 8, "where": "checkpoint", "tensor": TENSOR, "module": "4", "rank": rank}
    name = answer["reproduction"][-1]["run"]
    assert answer["place"] == answer["place"] | expected | {"num_tensors": 1, "run": name}
    # A later resume would have continued from it; this run did not.
    assert answer["first_difference"] is None
    shutil.rmtree(copy.folder)


def test_a_run_equals_its_replay_and_an_equal_run(quiet_runs: QuietRuns) -> None:
    run = quiet_runs.of(text=TEXT)
    other = quiet_runs.of(text=TEXT, environment={"ANOTHER": "RUN"})
    done = hpc_train("bisect", run.folder, other.folder)
    assert done.code == 0 and "digests: bitwise identical in 16 steps" in done.out, done.err + done.out
    assert done.out.endswith("no difference\n") and "replay" not in done.err
    assert [saved.step for saved in run.checkpoint_folders()] == [4, 8, 12, 16], "keep_every"
    answer = bisected(run.folder, "--from", "9", "--to", "13", code=0)
    (own,) = answer["reproduction"]
    expected = {"checkpoint": 8, "is_reproducible": True, "compared": 5, "equal_checkpoints": [12]}
    assert own == own | expected and answer["place"] is None


@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_parts_of_tensors_are_compared_by_rank(strategy: str, quiet_runs: QuietRuns) -> None:
    words = (f"parallel.strategy={strategy}",)
    run, other = (quiet_runs.of(*words, *more, text=TEXT) for more in ((), (flip("output", 1),)))
    answer = bisected(run.folder, other.folder, code=1)
    assert answer["place"] == answer["place"] | FAULTS[flip("output", 1)]
    assert [one["is_reproducible"] for one in answer["reproduction"]] == [True, True]
    answer = bisected(other.folder, "--from", "9", "--to", "12", code=0)
    assert answer["reproduction"][0]["equal_checkpoints"] == [12]
