"""Which checkpoints count, whether they are whole, and what removal leaves."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import xxhash

from hpc_train.errors import BadFileError
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.run import checkpoints as module
from hpc_train.run import storage_errors
from hpc_train.run.checkpoints import (
    FileEntry,
    Manifest,
    NewerVersionError,
    all_set_aside,
    committed,
    counts,
    damaged,
    hash_file,
    is_set_aside,
    kept_best,
    listing,
    newest_attempt,
    prune,
    remove,
    selection_words,
    set_aside,
    verify,
)
from hpc_train.run.file_shapes import encoded


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


def begin_attempt(run: RunPaths, number: int, checkpoints: list[str] | None = None) -> None:
    run.attempt(number).folder.mkdir(parents=True, exist_ok=True)
    run.attempt(number).record.write_text(json.dumps({"checkpoints": checkpoints or []}))


def write_checkpoint(run: RunPaths, step: int, attempt: int) -> CheckpointPaths:
    checkpoint = run.checkpoint(step)
    checkpoint.folder.mkdir(parents=True)
    checkpoint.state.write_text('{"version": 1}')
    checkpoint.shard(0).write_bytes(b"tensors" * 100)
    checkpoint.shard(1).write_bytes(b"more tensors" * 100)
    files = {
        path.name: FileEntry(path.stat().st_size, hash_file(path)) for path in checkpoint.folder.iterdir()
    }
    Manifest(step, attempt, 2, files).write(checkpoint)
    return checkpoint


def save(run: RunPaths, *steps: int) -> None:
    """Save these steps in attempt 1."""
    begin_attempt(run, 1)
    for step in steps:
        write_checkpoint(run, step, attempt=1)


def change_manifest(checkpoint: CheckpointPaths, **changes: object) -> None:
    data = json.loads(checkpoint.manifest.read_text())
    checkpoint.manifest.write_text(json.dumps(data | changes))


def names(checkpoints: list[CheckpointPaths]) -> list[str]:
    return [checkpoint.folder.name for checkpoint in checkpoints]


def test_a_manifest_comes_back_as_it_was_written(run: RunPaths) -> None:
    checkpoint = write_checkpoint(run, 500, 3)
    assert verify(checkpoint) == []
    manifest = Manifest.read(checkpoint)
    assert (manifest.step, manifest.attempt, manifest.world_size) == (500, 3, 2)
    shard = manifest.files["shard-00000.safetensors"]
    assert shard == FileEntry(700, xxhash.xxh3_128(b"tensors" * 100).hexdigest())
    written = json.loads(checkpoint.manifest.read_text())
    assert written["version"] == 2
    assert written["files"]["shard-00000.safetensors"] == {"size": 700, "xxh3_128": shard.digest}


def test_an_attempt_counts_what_it_wrote_and_what_it_listed(run: RunPaths) -> None:
    begin_attempt(run, 1)
    first = write_checkpoint(run, 100, attempt=1)
    assert names(committed(run)) == ["step-00000100"]
    begin_attempt(run, 2, listing(run))
    write_checkpoint(run, 200, attempt=2)
    assert names(committed(run)) == ["step-00000200", "step-00000100"]
    assert counts(run, first, attempt=2)


@pytest.mark.fault(15)
def test_what_an_old_attempt_commits_after_a_newer_began_does_not_count(run: RunPaths) -> None:
    begin_attempt(run, 1)
    begin_attempt(run, 2, listing(run))
    late = write_checkpoint(run, 100, attempt=1)
    assert committed(run) == []
    assert counts(run, late, attempt=1)
    begin_attempt(run, 3, listing(run))
    assert committed(run) == []


def test_a_listing_is_inherited_over_several_attempts(run: RunPaths) -> None:
    save(run, 100)
    for attempt in (2, 3, 4):
        begin_attempt(run, attempt, listing(run))
    assert names(committed(run)) == ["step-00000100"]


def test_an_attempts_own_listing_or_a_later_ones_gives_no_claim(run: RunPaths) -> None:
    begin_attempt(run, 2, ["step-00000100"])
    begin_attempt(run, 5, ["step-00000100"])
    checkpoint = write_checkpoint(run, 100, attempt=2)
    assert not counts(run, checkpoint, attempt=4)  # listed by 5 alone, and 2's own listing says nothing
    assert counts(run, checkpoint, attempt=5)
    assert counts(run, checkpoint, attempt=6)


def test_an_attempt_that_ended_before_its_record_takes_nothing_away(run: RunPaths) -> None:
    save(run, 100)
    run.attempt(2).folder.mkdir()
    assert newest_attempt(run) == 1
    assert names(committed(run)) == ["step-00000100"]
    run.attempt(3).folder.mkdir()
    assert listing(run) == ["step-00000100"]
    begin_attempt(run, 3, listing(run, 3))
    assert names(committed(run)) == ["step-00000100"]


def test_attempts_are_ordered_as_numbers_and_a_run_without_any_has_no_checkpoints(run: RunPaths) -> None:
    assert newest_attempt(run) == 0 and kept_best(run) is None
    assert committed(run) == [] == listing(run)
    for attempt in (9, 10):
        begin_attempt(run, attempt)
    assert newest_attempt(run) == 10


@pytest.mark.fault(13)
def test_partial_and_unreadable_folders_never_count(run: RunPaths) -> None:
    begin_attempt(run, 1)
    run.checkpoint(300).folder.mkdir(parents=True)
    write_checkpoint(run, 200, attempt=1).manifest.write_text("{")
    write_checkpoint(run, 100, attempt=1)
    (run.checkpoints / "step-00000400.tmp-1").mkdir()
    assert names(committed(run)) == ["step-00000100"]
    assert [found.step for found in damaged(run)] == [300, 200]


def flip_a_bit(checkpoint: CheckpointPaths) -> None:
    octets = bytearray(checkpoint.shard(1).read_bytes())
    octets[77] ^= 1
    checkpoint.shard(1).write_bytes(octets)


def link_outside(checkpoint: CheckpointPaths) -> None:
    shutil.copy(checkpoint.shard(1), checkpoint.folder.parent / "outside")
    checkpoint.shard(1).unlink()
    checkpoint.shard(1).symlink_to(checkpoint.folder.parent / "outside")


def put_a_pipe(checkpoint: CheckpointPaths) -> None:
    checkpoint.shard(1).unlink()
    os.mkfifo(checkpoint.shard(1))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda c: c.shard(1).unlink(), "shard-00001.safetensors is missing"),
        (lambda c: os.truncate(c.shard(1), 50), "shard-00001.safetensors has 50 bytes"),
        (flip_a_bit, "shard-00001.safetensors is damaged"),
        (link_outside, "shard-00001.safetensors is not a plain file"),
        (put_a_pipe, "shard-00001.safetensors is not a plain file"),
        (lambda c: c.manifest.unlink(), "manifest.json is missing"),
        (lambda c: c.manifest.write_text("[]"), "manifest.json is not a JSON object"),
        (lambda c: c.manifest.write_bytes(b"\xff\xfe"), "manifest.json is not a JSON object"),
        (lambda c: c.manifest.write_text('{"a":' * 100_000), "manifest.json is not a JSON object"),
        (lambda c: change_manifest(c, step=99), "step is 99"),
        (lambda c: change_manifest(c, files={}), "state.json is not among the files"),
    ],
)
def test_verify_names_the_file_that_is_wrong(run: RunPaths, damage, said: str) -> None:  # type: ignore[no-untyped-def]
    checkpoint = write_checkpoint(run, 100, attempt=1)
    damage(checkpoint)
    [problem] = verify(checkpoint)
    assert said in problem


def test_verify_finds_json_that_is_none_though_its_hash_is_right(run: RunPaths) -> None:
    checkpoint = write_checkpoint(run, 100, attempt=1)
    checkpoint.state.write_text("not json")
    files = json.loads(checkpoint.manifest.read_text())["files"]
    files["state.json"] = encoded(FileEntry(8, hash_file(checkpoint.state)))
    change_manifest(checkpoint, files=files)
    assert verify(checkpoint) == [f"{checkpoint.state} is not a JSON object"]


def test_parts_of_a_verification_cover_every_file_once(run: RunPaths) -> None:
    checkpoint = write_checkpoint(run, 100, attempt=1)
    for path in (checkpoint.state, checkpoint.shard(0), checkpoint.shard(1)):
        path.write_bytes(b"x")
    found = [verify(checkpoint, part, 2) for part in range(2)]
    assert sorted(map(len, found)) == [1, 2]
    assert len({*found[0], *found[1]}) == 3


ENTRY = {"size": 1, "xxh3_128": "0" * 32}


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 3},
        {"version": 1},
        {"step": "100"},
        {"attempt": True},
        {"world_size": -1},
        {"files": [ENTRY]},
        {"files": {"../../x": ENTRY}},
        {"files": {"..": ENTRY}},
        {"files": {"/etc/passwd": ENTRY}},
        {"files": {"a\x00b": ENTRY}},
        {"files": {"x": ENTRY | {"size": "1"}}},
        {"files": {"x": ENTRY | {"size": -1}}},
        {"files": {"x": ENTRY | {"xxh3_128": "short"}}},
        {"files": {"x": ENTRY | {"xxh3_128": "g" * 32}}},
        {"files": {"x": {"size": 1, "crc": "0" * 32}}},
        {"files": {"x": 5}},
    ],
)
def test_a_hostile_manifest_opens_no_file(run: RunPaths, changes: dict[str, object]) -> None:
    checkpoint = write_checkpoint(run, 100, attempt=1)
    change_manifest(checkpoint, **changes)
    with pytest.raises(BadFileError, match=r"manifest\.json"):
        Manifest.read(checkpoint)
    assert verify(checkpoint)


def test_a_checkpoint_of_a_newer_version_is_not_damaged_and_blocks_resume(run: RunPaths) -> None:
    begin_attempt(run, 1)
    newer = write_checkpoint(run, 200, attempt=1)
    write_checkpoint(run, 100, attempt=1)
    change_manifest(newer, version=3, hpc_train="9.1.0")
    for look in (damaged, committed, listing):
        with pytest.raises(NewerVersionError, match=r"version is 3, .*use hpc-train 9\.1\.0, or"):
            look(run)
    change_manifest(newer, hpc_train=None)
    with pytest.raises(NewerVersionError, match="use the hpc-train that wrote it, or a newer one"):
        damaged(run)
    assert names(run.checkpoint_folders()) == ["step-00000100", "step-00000200"]


def test_a_concurrent_removal_is_not_damage(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_attempt(run, 1)
    gone = write_checkpoint(run, 100, attempt=1)
    folders = run.checkpoint_folders()
    remove(gone.folder)
    monkeypatch.setattr(RunPaths, "checkpoint_folders", lambda _: folders)
    assert damaged(run) == {}
    assert set_aside(gone, "missing") is None
    assert all_set_aside(run) == {}


def test_what_is_set_aside_is_kept_under_names_of_its_own(run: RunPaths) -> None:
    begin_attempt(run, 1)
    for _ in range(3):
        set_aside(write_checkpoint(run, 100, attempt=1), "why not")
    named = [f"step-00000100.bad{end}" for end in ("", "-2", "-3")]
    assert all_set_aside(run) == dict.fromkeys(named, "why not")
    assert (run.checkpoints / named[2] / "manifest.json").is_file()
    assert (run.checkpoints / named[0] / "why.txt").read_text() == "why not\n"
    assert committed(run) == []
    unverified = set_aside(write_checkpoint(run, 100, attempt=1), "wrong sums", "unverified")
    assert (
        unverified is not None and unverified.name == "step-00000100.unverified" and is_set_aside(unverified)
    )
    assert all_set_aside(run).keys() == set(named), "it is not damaged, so a run may start again without it"


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"keep": 1}, [7, 6]),
        ({"keep": 2}, [7, 6]),
        ({"keep": 3}, [7, 6, 4]),
        ({"keep": 9}, [7, 6, 4, 3, 2]),
        ({"keep": 2, "keep_every": 2}, [7, 6, 4, 2]),
        ({"keep": 2, "keep_every": 3}, [7, 6, 3]),
        ({"keep": 2, "keep_every": 9}, [7, 6]),
        ({"keep": 2, "keep_every": 1}, [7, 6, 4, 3, 2]),
        ({"keep": 2, "needed": [3]}, [7, 6, 3]),
    ],
)
def test_pruning_keeps_the_newest_two_at_least_multiples_and_what_is_needed(
    run: RunPaths, options: dict[str, Any], left: list[int]
) -> None:
    save(run, 2, 3, 4, 6, 7)
    prune(run, attempt=1, **options)
    assert [checkpoint.step for checkpoint in committed(run)] == left
    assert len(list(run.checkpoints.iterdir())) == len(left)


@pytest.mark.fault(13)
def test_partial_folders_are_not_counted_as_kept(run: RunPaths) -> None:
    save(run, 1, 2, 3)
    for step in (4, 5):
        write_checkpoint(run, step, attempt=1).manifest.unlink()
    prune(run, 2, attempt=1)
    assert [checkpoint.step for checkpoint in committed(run)] == [3, 2]


def test_pruning_removes_left_overs_but_nothing_of_a_living_attempt_or_of_others(run: RunPaths) -> None:
    begin_attempt(run, 2)
    kept = ["step-00000007.tmp-2", "step-00000007.tmp-3", "step-00000006.bad", "notes"]
    removed = ["step-00000005.tmp-1", "step-00000004.removed-0123abcd"]
    for name in kept + removed:
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / "file").touch()
    assert prune(run, 3, attempt=2) == sorted(removed)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == sorted(kept)


def test_a_half_done_removal_leaves_no_checkpoint(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run, 1, 2, 3)

    def stop(folder: Path) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", stop)
        with pytest.raises(OSError, match="Input/output"):
            prune(run, 2, attempt=1)
    assert run.checkpoint_folders() == [run.checkpoint(2), run.checkpoint(3)]
    prune(run, 2, attempt=1)
    assert len(list(run.checkpoints.iterdir())) == 2


@pytest.mark.fault(15)
def test_an_attempt_that_lost_the_run_removes_nothing(run: RunPaths) -> None:
    save(run, 1, 2, 3)
    begin_attempt(run, 2, ["step-00000001"])
    assert prune(run, 2, attempt=1) == []
    assert names(committed(run)) == ["step-00000001"]
    assert len(list(run.checkpoints.iterdir())) == 3


@pytest.mark.fault(9)
@pytest.mark.parametrize(("times", "is_whole"), [(2, True), (99, False)])
def test_a_file_server_that_is_away_does_not_make_a_checkpoint_damaged(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, times: int, is_whole: bool
) -> None:
    checkpoint = write_checkpoint(run, 100, attempt=1)
    left = [times]

    def stale(path: Path) -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return hash_file(path)

    monkeypatch.setattr(module, "hash_file", stale)
    monkeypatch.setattr(storage_errors, "RETRY_AFTER_S", (0.0, 0.0))
    if is_whole:
        assert verify(checkpoint) == []
    else:
        with pytest.raises(OSError, match="Stale"):
            verify(checkpoint)


def test_the_best_up_to_each_kept_checkpoint_is_kept(run: RunPaths) -> None:
    """The newest names 300; if it turns out to be damaged, the one before names 200."""
    begin_attempt(run, 1)
    for step, best in {100: 100, 200: 200, 300: 300, 400: 300, 500: 200, 600: 300}.items():
        facts = {"metric": "loss", "value": 0.5, "step": best}
        change_manifest(write_checkpoint(run, step, attempt=1), best=facts)
    assert prune(run, 2, 1) == ["step-00000400", "step-00000100"]
    best = kept_best(run)
    assert best is not None and best.step == 300


def test_the_newest_verified_up_to_each_kept_checkpoint_is_kept(run: RunPaths) -> None:
    """Steps 250 and 50 were compared; a difference at the next comparison goes back to 200."""
    begin_attempt(run, 1)
    for step, verified in {100: 50, 200: 50, 300: 250, 400: 250, 500: 250}.items():
        change_manifest(write_checkpoint(run, step, attempt=1), verified=verified)
    assert prune(run, 2, 1) == ["step-00000300", "step-00000100"]
    assert Manifest.read(committed(run)[0]).verified == 250


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (100, "the checkpoint, step 100 (the best: loss 0.5 at step 200)"),
        (200, "the best checkpoint, loss 0.5 at step 200 (--last: step 300)"),
        (300, "the last checkpoint, step 300 (the best: loss 0.5 at step 200)"),
    ],
)
def test_a_selected_checkpoint_is_named_with_the_best_or_the_last(
    run: RunPaths, step: int, words: str
) -> None:
    begin_attempt(run, 1)
    write_checkpoint(run, 50, attempt=1)
    assert selection_words(run, step) == ""
    for saved in (100, 200, 300):
        facts = {"metric": "loss", "value": 0.5, "step": 200}
        change_manifest(write_checkpoint(run, saved, attempt=1), best=facts)
    assert selection_words(run, step) == words
