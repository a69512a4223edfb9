"""``verify --replay`` repeats every stretch of a run, and names the one in which a bit differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.paths import RunPaths
from hpc_train.run.checkpoints import FileEntry, Manifest, hash_file
from hpc_train.run.digests import encoded, read_digests
from tests.cli.json_checks import checked
from tests.end_to_end.flips import FLIP
from tests.end_to_end.runs import hpc_train
from tests.end_to_end.test_bisect import STEP, TENSOR, TEXT, flip_bit
from tests.end_to_end.test_evaluate import content
from tests.end_to_end.test_replay import copy_run
from tests.quiet import QuietRuns

pytestmark = pytest.mark.slow

WORDS = ("checkpoint.digests=parts", "checkpoint.parts_every=2")


def verified(run: RunPaths, *options: str, code: int) -> dict[str, Any]:
    done = hpc_train("verify", run.folder, "--replay", "--json", *options)
    assert done.code == code, done.err + done.out
    (answer,) = checked("verify", done.out)["runs"]
    found: dict[str, Any] = answer
    return found


@pytest.fixture
def copied(quiet_runs: QuietRuns, tmp_path: Path) -> RunPaths:
    run = quiet_runs.of(*WORDS, text=TEXT)
    copy = RunPaths(tmp_path / "runs" / "digits" / run.folder.name)
    copy.folder.parent.mkdir(parents=True, mode=0o700)
    copy_run(run, copy)
    return copy


def test_all_stretches_of_a_run_are_repeated_in_slots(quiet_runs: QuietRuns) -> None:
    run = quiet_runs.of(*WORDS, text=TEXT)
    before = content(run)
    answer = verified(run, "--slots", "2", code=0)
    ends = [(stretch["first"], stretch["last"]) for stretch in answer["stretches"]]
    assert ends == [(1, 4), (5, 8), (9, 12), (13, 16)] and answer["slots"] == 2
    assert {stretch["slot"] for stretch in answer["stretches"]} == {1, 2}
    for stretch in answer["stretches"]:
        assert (stretch["result"], stretch["tolerance"], stretch["numbers"]) == ("identical", 0, [])
        own = stretch["reproduction"]
        assert (own["ranks"], own["compared"], own["equal_parts"]) == (2, 4, 2)
        assert own["equal_checkpoints"] == [stretch["last"]] and stretch["seconds"] > 0
        assert stretch["node"] == stretch["host"]
    text = hpc_train("verify", run.folder, "--replay", "--part", "2/4")
    assert text.code == 0 and "5 to 8  bitwise identical" in text.out, text.out + text.err
    assert "no difference in 1 stretch, " in text.out and content(run) == before


def rehash(run: RunPaths) -> None:
    checkpoint = run.checkpoint(8)
    shard = checkpoint.shard(flip_bit(checkpoint))
    manifest, entry = Manifest.read(checkpoint), FileEntry(shard.stat().st_size, hash_file(shard))
    replace(manifest, files=manifest.files | {shard.name: entry}).write(checkpoint)


def change_digest(run: RunPaths) -> None:
    records, octets = list(read_digests(run.digests)), bytearray(run.digests.read_bytes())
    octets[16 + 5 * 40 : 16 + 6 * 40] = encoded(replace(records[5], loss=1.0))
    run.digests.write_bytes(octets)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (rehash, {"step": 8, "where": "checkpoint", "tensor": TENSOR}),
        (lambda run: flip_bit(run.checkpoint(8)), {"step": 8, "where": "checkpoint", "tensor": TENSOR}),
        (change_digest, {"step": 6, "where": "record"}),
    ],
    ids=["a bit of a moment with its hash", "without its hash", "a digest"],
)
def test_the_stretch_of_a_changed_run_is_named(
    change: Callable[[RunPaths], object], place: dict[str, Any], copied: RunPaths
) -> None:
    change(copied)
    answer = verified(copied, code=1)
    stretches = answer["stretches"]
    first = next(stretch for stretch in stretches if stretch["result"] != "identical")
    assert first["first"] <= place["step"] <= first["last"] and first["result"] == "differs"
    assert first["first_difference"] == first["first_difference"] | place
    is_damaged = any(saved["problems"] for saved in answer["checkpoints"])
    assert [stretch["first"] for stretch in stretches] == ([1, 5, 13] if is_damaged else [1, 5, 9, 13])
    if place["where"] == "record":
        recorded, replayed = first["numbers"]
        assert recorded["loss"] == 1.0 != replayed["loss"]
        done = hpc_train("verify", copied.folder, "--replay", "--part", "2/4")
        assert done.code == 1 and "5 to 8  differs at step 6  " in done.out, done.out
        assert f"hpc-train bisect {copied.folder.name} --from 5 --to 8\n" in done.out
        # The file can't be bitwise on another number of ranks.
        (other, *_) = verified(copied, "--devices", "1", "--part", "1/4", code=0)["stretches"]
        assert other["result"] == "close" and 0 < other["distance"] < other["tolerance"] == 0.05


def test_a_fault_of_the_machine_is_in_its_stretch_alone(quiet_runs: QuietRuns) -> None:
    words = (*WORDS, "optimization.clip_grad_norm=null")
    run = quiet_runs.of(*words, text=TEXT, environment={FLIP: f"gradient:{STEP}:1:head:18"})
    stretches = verified(run, code=1)["stretches"]
    assert [stretch["result"] for stretch in stretches] == ["identical", "identical", "differs", "identical"]
    place = stretches[2]["first_difference"]
    assert (place["step"], place["where"], place["module"]) == (STEP, "part", "head")
