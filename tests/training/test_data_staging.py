"""The pack on the node's own disk: copied once, reused, and never waited for without progress."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from PIL import Image

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.paths import RunPaths
from hpc_train.rank.env import RankFacts
from hpc_train.training import data_staging
from hpc_train.training.data_staging import PackCopy, copy_of, staged, verified
from hpc_train.training.datasets import packing
from hpc_train.training.datasets.base import DataSource
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.packed import find_pack
from hpc_train.training.health.progress import Progress
from hpc_train.training.rank import Rank
from tests.disks import SyncedFiles, small_disk
from tests.waiting import HANG_LIMIT_S, came_true


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    monkeypatch.setenv("HPC_TRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packing, "_checked", set())
    monkeypatch.setattr(data_staging, "_SPARE_BYTES", 0)
    for number in range(6):
        path = tmp_path / f"images/train/class{number % 2}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((100, 100), 90).convert("RGB").save(path)
    disk = tmp_path / "disk"
    disk.mkdir()
    root, cache = str(tmp_path / "images"), str(tmp_path / "packs")
    made = DataConfig(name="imagefolder", root=root, cache=cache, stage=str(disk))
    build_source(made, download=True)
    return made


def rank_of(data: DataConfig, run: Path, local_rank: int = 0, attempt: int = 1) -> Rank:
    """Return as much of a rank of two on a node as staging uses."""
    paths = RunPaths(run)
    paths.attempt(attempt).folder.mkdir(parents=True, exist_ok=True)
    rank = SimpleNamespace(
        experiment=SimpleNamespace(data=data),
        paths=paths,
        attempt=attempt,
        node="n1",
        facts=RankFacts(rank=local_rank, world_size=2, local_rank=local_rank, local_world_size=2),
        progress=Progress(),
    )
    return cast(Rank, rank)


def copy(data: DataConfig) -> PackCopy:
    return copy_of(find_pack(data), Path(cast(str, data.stage)))


@contextmanager
def beside(function: Any) -> Iterator[list[Any]]:
    """Run ``function`` in a thread; the list has its result once the block has ended."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    yield results
    thread.join(HANG_LIMIT_S)
    assert not thread.is_alive()


def test_two_ranks_read_one_copy(data: DataConfig, tmp_path: Path) -> None:
    first, second = rank_of(data, tmp_path / "run"), rank_of(data, tmp_path / "run", local_rank=1)
    with beside(lambda: staged(second)) as others:
        ours = staged(first)
    assert others == [ours] and ours.cache == str(copy(data).folder)
    assert first.progress.standing.times == second.progress.standing.times == 101
    assert first.progress.standing.phase == "staging data"
    local, shared = (build_source(config).train for config in (ours, data))
    assert str(local.pack.path).startswith(str(data.stage)) and not str(shared.pack.path).startswith(
        str(data.stage)
    )
    for index in range(6):
        assert local.file_content(index) == shared.file_content(index)
        assert local.path(index) == shared.path(index)


def test_a_later_attempt_reuses_the_copy(data: DataConfig, tmp_path: Path) -> None:
    staged(rank_of(data, tmp_path / "run"))
    before = copy(data).path.stat()
    again = staged(rank_of(data, tmp_path / "run", attempt=2))
    assert again.cache == str(copy(data).folder)
    assert (copy(data).path.stat().st_ino, copy(data).path.stat().st_mtime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
    )


@pytest.mark.parametrize("damage", ["truncated", "other end", "empty"])
def test_a_copy_that_is_not_complete_is_made_again(data: DataConfig, tmp_path: Path, damage: str) -> None:
    staged(rank_of(data, tmp_path / "run"))
    path = copy(data).path
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[:-1], "other end": whole[:-40] + b"x" * 40, "empty": b""}[damage])
    staged(rank_of(data, tmp_path / "run", attempt=2))
    assert path.read_bytes() == whole


def test_what_a_killed_copy_left_is_replaced(data: DataConfig, tmp_path: Path) -> None:
    made = copy(data)
    made.folder.mkdir(parents=True)
    made.folder.parent.chmod(0o700)
    made._partial.write_bytes(b"x" * 10_000_000)
    staged(rank_of(data, tmp_path / "run"))
    assert made.is_complete and not made._partial.exists()


def test_a_rank_waits_for_a_copy_under_way_and_reports_its_progress(data: DataConfig, tmp_path: Path) -> None:
    made = copy(data)
    made.folder.mkdir(parents=True)
    made.folder.parent.chmod(0o700)
    made._partial.write_bytes(b"x" * (made.source.nbytes // 2))
    first, second = rank_of(data, tmp_path / "run"), rank_of(data, tmp_path / "run", local_rank=1)
    with (made.folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as another job does
        with beside(lambda: staged(first)) as ours, beside(lambda: staged(second)) as theirs:
            for rank in (first, second):
                assert came_true(lambda rank=rank: rank.progress.standing.part in (49, 50), HANG_LIMIT_S)  # type: ignore[misc]
            assert not made.path.exists()
            fcntl.flock(lock, fcntl.LOCK_UN)
    assert ours == theirs and made.is_complete


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("is_noticed_late", [False, True])
def test_too_small_a_disk_is_one_warning(
    data: DataConfig,
    tmp_path: Path,
    is_noticed_late: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with small_disk(tmp_path / "small", "64k") as disk:
        small = data.model_copy(update={"stage": str(disk)})
        if is_noticed_late:  # somebody else fills it meanwhile
            monkeypatch.setattr(PackCopy, "_check_room", lambda self: None)
        second = rank_of(small, tmp_path / "run", local_rank=1)
        with beside(lambda: staged(second)) as others:
            assert staged(rank_of(small, tmp_path / "run")) == small
        assert others == [small]
        assert not list(disk.rglob("*.pack*")) and not list(disk.rglob(".*.partial"))
    (said,) = reasons(caplog)
    why = "No space left on device" if is_noticed_late else "has too little room"
    assert "the pack is read where it is" in said and why in said
    assert second.progress.standing.times == 101


@pytest.mark.parametrize(
    ("stage", "why"),
    [
        (True, r"neither $SLURM_TMPDIR nor $TMPDIR is set; write a folder"),
        ("$NO_SUCH_VARIABLE/x", "$NO_SUCH_VARIABLE/x has a variable that is not set on this node"),
        ("/nowhere/at/all", "/nowhere/at/all is not a folder on this node"),
    ],
)
def test_without_a_folder_the_pack_is_read_where_it_is(
    data: DataConfig,
    tmp_path: Path,
    stage: bool | str,
    why: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SLURM_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    given = data.model_copy(update={"stage": stage})
    for local_rank in (0, 1):
        assert staged(rank_of(given, tmp_path / "run", local_rank)) == given
    (said,) = reasons(caplog)
    assert said.endswith(why)


def test_true_is_the_jobs_folder(data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, node = tmp_path / "job", tmp_path / "node"
    monkeypatch.setenv("TMPDIR", str(node))
    given = data.model_copy(update={"stage": True})
    for folder in (node, job):
        folder.mkdir()
        local = staged(rank_of(given, tmp_path / folder.name / "run")).cache
        assert local is not None and Path(local).is_relative_to(folder)
        monkeypatch.setenv("SLURM_TMPDIR", str(job))


def test_a_folder_that_others_may_write_is_not_used(
    data: DataConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = Path(cast(str, data.stage)) / f"hpc-train-{os.geteuid()}"
    own.mkdir()
    own.chmod(0o777)
    assert staged(rank_of(data, tmp_path / "run")) == data
    (said,) = reasons(caplog)
    assert f"{own}: group or others may write it" in said


@pytest.mark.parametrize("change", [{"stage": False}, {"cache": None}])
def test_nothing_is_copied_if_it_is_off(data: DataConfig, tmp_path: Path, change: dict[str, Any]) -> None:
    given = data.model_copy(update=change)
    rank = rank_of(given, tmp_path / "run")
    assert staged(rank) is given and rank.progress.standing.times == 0
    assert list(Path(cast(str, data.stage)).iterdir()) == []


def test_a_damaged_copy_is_never_other_pixels(data: DataConfig, tmp_path: Path) -> None:
    local = staged(rank_of(data, tmp_path / "run"))
    train = build_source(local).train
    with copy(data).path.open("r+b") as file:
        file.seek(int(train.ends[3]) + 40)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(Exception, match=r"the hash of sample 3 .*; remove the file, then run"):
        train.file_content(3)


def source_of(verify: Any) -> DataSource:
    return DataSource(cast(Any, None), None, cast(Any, None), verify)


def test_the_first_rank_of_a_node_verifies_for_all(data: DataConfig, tmp_path: Path) -> None:
    calls = []

    def verify(report: Any) -> None:
        calls.append(1)
        report(0.5)

    first, second = rank_of(data, tmp_path / "run"), rank_of(data, tmp_path / "run", local_rank=1)
    source = source_of(verify)
    with beside(lambda: verified(second, source)) as others:
        assert verified(first, source) is source
    assert others == [source] and calls == [1]
    assert first.progress.standing.times == second.progress.standing.times == 101


def test_damaged_files_are_an_error_on_all_ranks_of_the_node(data: DataConfig, tmp_path: Path) -> None:
    def verify(report: Any) -> None:
        raise BadFileError("data.root: train-00000.tokens is damaged")

    for local_rank in (0, 1):
        with pytest.raises(BadFileError, match=r"^data\.root: train-00000\.tokens is damaged"):
            verified(rank_of(data, tmp_path / "run", local_rank), source_of(verify))


def test_without_hashes_nothing_is_written(data: DataConfig, tmp_path: Path) -> None:
    source = source_of(None)
    assert verified(rank_of(data, tmp_path / "run", local_rank=1), source) is source


def test_a_copy_is_synced_before_it_gets_its_name(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a node that loses power keeps a copy of the right size without its content."""
    synced = SyncedFiles(monkeypatch)
    made = copy(data)
    made.make(lambda copied: None)
    assert made.path.stat().st_ino in synced.at_rename_to(made.path)
