"""``bisect`` names the step, and the first module or tensor, at which a fault made two runs differ."""

from __future__ import annotations

import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.run.checkpoints import FileEntry, Manifest, hash_file
from tests.cli.json_checks import checked
from tests.end_to_end import random_faults
from tests.end_to_end.flips import FLIP
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import COMPILED, hpc_train, only_run, start, work_tree, write_experiment
from tests.end_to_end.test_replay import copy_run, replayed
from tests.faults.schedule import chosen_seeds
from tests.quiet import QuietRuns

pytestmark = pytest.mark.slow

#: Checkpoints 4, 8, 12 and 16, all of them kept.
TEXT = random_faults.TEXT.replace("steps: 20", "steps: 16").replace("keep_every: 6", "keep_every: 4")
FLIP_TEXT = "gradient:10:0:head:18"
STEP = 10
PLACE = {"step": STEP, "where": "gradients", "tensor": "head.weight", "num_tensors": 1}


def bisected(*words: str | Path, code: int) -> dict[str, Any]:
    done = hpc_train("bisect", *words, "--json")
    assert done.code == code, done.err + done.out
    answer: dict[str, Any] = checked("bisect", done.out)
    return answer


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> random_faults.Sweep:
    return random_faults.Sweep(tmp_path_factory.mktemp("sweep"))


#: Seed 1 is a weight that is named in a forward, as is a module under ``tensor`` below; 2 a gradient, which
#: every strategy has below; 3 a moment, as the saved one below; 10 a fault of the machine.
HELD_BELOW = (1, 2, 3, 10)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.soak if seed in HELD_BELOW else [])
        for seed in chosen_seeds("1-10")
    ],
)
def test_a_random_fault_is_named(seed: int, sweep: random_faults.Sweep) -> None:
    """Each of the ten kinds in ``make test-full``; ``make bisect-faults`` has 60 seeds."""
    result = sweep.seed(seed)
    assert not result.error, f"{result.line()}\n{result.error}"


def test_without_digests_the_step_is_found_between_checkpoints(quiet_runs: QuietRuns) -> None:
    run, other = (
        quiet_runs.of("checkpoint.digests=off", *words, text=TEXT)
        for words in ((), (f"model.args.flip={FLIP_TEXT}",))
    )
    answer = bisected(run.folder, other.folder, code=1)
    assert (answer["compared"], answer["equal_checkpoint"], answer["other_checkpoint"]) == (0, 8, 12)
    assert answer["place"] == answer["place"] | PLACE
    assert answer["replays"] == 2, "all four steps are traced"


@pytest.mark.parametrize(("digests", "equal", "last", "replays"), [("off", None, 16, 4), ("parts", 8, 10, 2)])
def test_recorded_parts_save_replays(
    digests: str, equal: int | None, last: int, replays: int, quiet_runs: QuietRuns
) -> None:
    """Checkpoints 8 and 16; between them are too many steps to trace."""
    words = ("checkpoint.keep_every=null", f"checkpoint.digests={digests}")
    words += ("checkpoint.parts_every=2",) * (digests == "parts")
    flip = f"model.args.flip={FLIP_TEXT}"
    run, other = (quiet_runs.of(*words, *more, text=TEXT) for more in ((), (flip,)))
    answer = bisected(run.folder, other.folder, code=1)
    assert answer["place"] == answer["place"] | PLACE
    assert (answer["equal_parts"], answer["other_parts"]) == (equal, last if equal else None)
    assert answer["replays"] == replays, answer["reproduction"]


def test_recorded_parts_show_the_module_of_a_fault_of_the_machine(quiet_runs: QuietRuns) -> None:
    words = ("checkpoint.digests=parts", "checkpoint.parts_every=1", "optimization.clip_grad_norm=null")
    run = quiet_runs.of(*words, text=TEXT, environment={FLIP: FLIP_TEXT})
    answer = bisected(run.folder, code=1)
    expected = {
        "step": STEP,
        "where": "part",
        "module": "head",
        "tensor": "weights of head",
        "num_tensors": 2,
    }
    assert answer["place"] == answer["place"] | expected
    assert answer["reproduction"][0]["equal_parts"] == STEP - 1 - 4, "from checkpoint 4 on"


TENSOR = "optimizer.head.weight.exp_avg"


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
    expected = {"step": 8, "where": "checkpoint", "tensor": TENSOR, "module": "head", "rank": rank}
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


VIT, VIT_STEP = TEXT.replace("flips:net", "flips:vit").replace("steps: 16", "steps: 8"), 6
LAYER, PATCHES = "blocks.0.mlp.fc1", "patch_embed.proj"


@pytest.mark.parametrize(
    ("word", "kind", "expected"),
    [
        ("parallel.strategy=tensor", "output", {"where": "forward", "module": PATCHES, "micro_batch": 2}),
        ("parallel.strategy=pipeline", "gradient", {"where": "gradients", "tensor": f"{LAYER}.weight"}),
        pytest.param(  # a pipeline with one micro-batch
            *("parallel.strategy=split", "gradient", {"where": "gradients", "tensor": f"{LAYER}.weight"}),
            marks=pytest.mark.soak,
        ),
    ],
    ids=["tensor", "pipeline", "split"],
)
def test_other_strategies(word: str, kind: str, expected: dict[str, Any], quiet_runs: QuietRuns) -> None:
    """Modules have no digests in a pipeline, tensors have them."""
    change = f"model.args.flip={kind}:{VIT_STEP}:2:{expected.get('module', LAYER)}:18"
    run, other = (quiet_runs.of(word, *more, text=VIT) for more in ((), (change,)))
    answer = bisected(run.folder, other.folder, code=1)
    assert answer["place"] == answer["place"] | {"step": VIT_STEP} | expected, answer
    assert [one["is_reproducible"] for one in answer["reproduction"]] == [True, True]
    assert answer["replays"] <= 4


@pytest.mark.soak  # below, both replays of compiled runs are equal, too
def test_a_compiled_run_equals_its_replay(quiet_runs: QuietRuns) -> None:
    answer = bisected(quiet_runs.of(*COMPILED, ranks=1).folder, "--from", "8", code=0)
    (own,) = answer["reproduction"]
    expected = {"checkpoint": 7, "is_reproducible": True, "compared": 1, "equal_checkpoints": [8]}
    assert own == own | expected and answer["place"] is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["model.args.flip=output:5:2:head:18"], {"step": 5, "where": "loss", "micro_batch": 2}),
        pytest.param(  # eager runs have gradients above
            ["model.args.flip=gradient:5:2:stem:18"],
            {"step": 5, "where": "gradients", "tensor": "stem.weight"},
            marks=pytest.mark.soak,
        ),
        (["compile=false"], {"step": 1, "where": "loss", "micro_batch": 0}),
    ],
    ids=["output", "gradient", "one of two"],
)
def test_compiled_runs(words: list[str], expected: dict[str, Any], quiet_runs: QuietRuns) -> None:
    """A compiled model does not call its modules one by one: inputs, losses and tensors are compared."""
    run, other = (quiet_runs.of(*COMPILED, *more, ranks=1) for more in ((), words))
    answer = bisected(run.folder, other.folder, code=1)
    assert answer["place"] == answer["place"] | expected, answer
    assert [one["is_reproducible"] for one in answer["reproduction"]] == [True, True]
    assert answer["replays"] <= 4


def test_a_run_is_replayed_with_the_current_code(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(work_tree(), tree)
    words = ("--local", "--devices", "2", "device=cpu")
    runs = {"HPC_TRAIN_RUNS": str(tmp_path / "runs")}
    done = hpc_train("submit", write_experiment(tree, TEXT), *words, cwd=tree, **runs)
    assert done.code == 0, done.err
    run, code = only_run(tmp_path), tree / "tests/end_to_end/flips.py"
    code.write_text(code.read_text().replace('flip: str = ""', f'flip: str = "output:{STEP}:1:head:18"', 1))
    assert hpc_train("bisect", run.folder, cwd=tree).code == 0, "its own code"
    done = hpc_train("bisect", run.folder, "--code", "new", cwd=tree)
    assert done.code == 1 and f"up to step {STEP} (loss, gradient norm)" in done.out, done.out


def test_a_run_that_resumed_on_other_ranks_equals_its_replays(tmp_path: Path) -> None:
    """One rank trains, two continue; the checkpoint between them is of one."""
    runs = {"HPC_TRAIN_RUNS": str(tmp_path / "runs")}
    words = ("device=cpu", "checkpoint.keep=9", "--local", "--devices")
    with Hold(tmp_path, 5) as hold:
        process = start("submit", write_experiment(tmp_path, TEXT), hold.override, *words, "1", **runs)
        hold.wait(process)
        run = only_run(tmp_path)
        process.terminate()
        assert process.wait() == 130
    between = max(saved.step for saved in run.checkpoint_folders())
    done = hpc_train("resume", run.folder, "parallel.strategy=fsdp", "--devices", "2")
    assert done.code == 0, done.err
    answer = bisected(run.folder, code=0)
    own = [(one["checkpoint"], one["ranks"], one["is_reproducible"]) for one in answer["reproduction"]]
    assert own == [(4, 1, True), (between, 2, True)], answer
    answer = replayed(run, "--step", str(between + 1))
    (step,) = answer["replays"][0]["steps"]
    assert (answer["checkpoint"], answer["ranks_of_run"], step["differs"]) == (between, 2, [])
    text = hpc_train("verify", run.folder, "--replay")
    assert text.code == 0 and text.out.count("bitwise identical") == 5, text.out
