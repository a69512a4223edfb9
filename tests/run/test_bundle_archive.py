"""A bundle: the same bytes each time; extracted whole and verified, or refused."""

from __future__ import annotations

import dataclasses
import os
import stat
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_train.errors import BadFileError, HpcTrainError, StorageError, UsageError
from hpc_train.run import bundle_archive as module
from hpc_train.run.bundle_archive import SUFFIXES, Bundle, BundleFacts, Input, extract, write

LONG = "/".join(["a long name of a folder"] * 12) + "/file.txt"
NOT_UTF8 = os.fsdecode(b"inputs/data.root/content/\xff.png")
FILES = {
    "code/tree/run.sh": b"#!/bin/sh\n",
    "run/run.json": b"{}\n",
    "run/empty": b"",
    LONG: b"long",
    NOT_UTF8: bytes(range(256)) * 5,
}
INPUT = Input("inputs/data.root/content", is_included=True, is_folder=True)
FACTS = BundleFacts(
    id="abc",
    name="small",
    begin=0,
    checkpoints=[4, 8],
    ranks=2,
    device="cpu",
    processor="a processor",
    threads=[1, 1],
    is_deterministic=True,
    versions={"python": "3.11"},
    changes=[],
    inputs={"data.root": INPUT},
)


def has_library(suffix: str) -> bool:
    try:
        module.suffix_of(Path(f"x{suffix}"))
    except UsageError:
        return False
    return True


def suffixes() -> list[str]:
    return [suffix for suffix in SUFFIXES if has_library(suffix)]


def written(
    folder: Path, suffix: str = ".tar", files: dict[str, bytes] = FILES, facts: BundleFacts = FACTS
) -> Path:
    target = folder / f"run{suffix}"
    write(target, facts, dict(files), {"code/tree/run.sh"})
    return target


def extracted(archive: Path, folder: Path) -> Bundle:
    folder.mkdir()
    return extract(archive, folder)


@pytest.mark.parametrize("suffix", suffixes())
def test_what_was_written_is_extracted_and_closed_to_others(suffix: str, tmp_path: Path) -> None:
    archive, folder = written(tmp_path, suffix), tmp_path / "out"
    bundle = extracted(archive, folder)
    assert bundle.facts == FACTS and len(bundle.content) == 64
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert {name: path.read_bytes() for name, path in found.items()} == FILES
    assert all(not stat.S_IMODE(path.stat().st_mode) & 0o077 for path in folder.rglob("*"))
    assert [name for name, path in found.items() if path.stat().st_mode & stat.S_IXUSR] == [
        "code/tree/run.sh"
    ]
    (tmp_path / "again").mkdir()
    assert written(tmp_path / "again", suffix).read_bytes() == archive.read_bytes()


def test_other_programs_read_it(tmp_path: Path) -> None:
    with tarfile.open(written(tmp_path, ".tar.gz"), errors="surrogateescape") as archive:
        members = archive.getmembers()
    assert [member.name for member in members[:2]] == ["bundle.json", members[1].name]
    assert {(member.mtime, member.uid, member.gid, member.uname) for member in members} == {(0, 0, 0, "")}
    assert {member.name for member in members} >= {NOT_UTF8, "run/empty", "code/tree/run.sh"}


def refusal(archive: Path, folder: Path) -> str:
    with pytest.raises(BadFileError) as error:
        extracted(archive, folder)
    return str(error.value)


def test_any_changed_byte_is_refused_and_the_changed_file_named(tmp_path: Path) -> None:
    archive = written(tmp_path)
    content = archive.read_bytes()
    for place in range(0, len(content), 23):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        archive.write_bytes(changed)
        refusal(archive, tmp_path / f"out-{place}")
    archive.write_bytes(content.replace(b"#!/bin/sh", b"#!/bin/sx"))
    text = refusal(archive, tmp_path / "out")
    assert "run.tar: code/tree/run.sh: its SHA-256 is not the one in bundle.json" in text


@pytest.mark.parametrize("suffix", suffixes())
@pytest.mark.parametrize(
    "change", [lambda data: data[:-40], lambda data: data[: len(data) // 2], lambda data: b""]
)
def test_an_archive_that_was_cut_off_is_refused(
    change: Callable[[bytes], bytes], suffix: str, tmp_path: Path
) -> None:
    archive = written(tmp_path, suffix)
    archive.write_bytes(change(archive.read_bytes()))
    assert "was changed or cut off" in refusal(archive, tmp_path / "out")


def test_further_members_are_refused(tmp_path: Path) -> None:
    archive = written(tmp_path)
    archive.write_bytes(archive.read_bytes() + bytes(512))
    assert "has more members than it lists" in refusal(archive, tmp_path / "out")


HOSTILE: dict[str, dict[str, bytes]] = {
    "not a path below a folder": {"../x": b"", "run/run.json": b"{}"},
    "'/tmp/x'": {"/tmp/x": b""},
    "'a//b'": {"a//b": b""},
    "'.'": {".": b""},
    "is a file and a folder": {"a": b"", "a/b": b""},
}


@pytest.mark.parametrize("text", HOSTILE)
def test_paths_out_of_the_folder_are_refused(text: str, tmp_path: Path) -> None:
    """Whoever makes such an archive can make its hashes, too."""
    archive = written(tmp_path, files=HOSTILE[text])
    before = sorted(tmp_path.iterdir())
    assert text in refusal(archive, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "out"])


def test_names_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    archive = written(tmp_path, facts=dataclasses.replace(FACTS, name="../../x"))
    assert "bundle.json was changed" in refusal(archive, tmp_path / "out")


def test_links_and_devices_are_refused(tmp_path: Path) -> None:
    archive = tmp_path / "run.tar"
    for kind in (
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.CHRTYPE,
        tarfile.XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
    ):
        content = bytearray(written(tmp_path).read_bytes())
        info = tarfile.TarInfo("bundle.json")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.write_bytes(info.tobuf(tarfile.GNU_FORMAT)[:512] + content[512:])
        assert "does not begin with bundle.json" in refusal(archive, tmp_path / f"out-{kind!r}")


def test_a_bundle_of_a_later_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VERSION", 2)
    archive = written(tmp_path)
    monkeypatch.undo()
    assert "version is 2 and this hpc-train reads 1" in refusal(archive, tmp_path / "out")


def test_it_takes_no_more_space_than_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_space", lambda folder: 1000)
    with pytest.raises(StorageError, match="has 1,000 bytes free"):
        extracted(written(tmp_path), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_file_that_changes_meanwhile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "metrics.jsonl"
    source.write_bytes(b"{}\n")
    monkeypatch.setattr(module, "_size_and_hash", lambda path: (2, "0" * 64))
    with pytest.raises(StorageError, match="changed while it was read"):
        write(tmp_path / "run.tar", FACTS, {"run/metrics.jsonl": source}, set())
    assert not (tmp_path / "run.tar").exists()


def test_the_suffix_selects_the_compression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"a bundle's name ends in \.tar\.zst, \.tar\.xz, \.tar\.gz, \.tar"):
        written(tmp_path, ".zip")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression", None)
    with pytest.raises(HpcTrainError, match=r"needs Python 3\.14 or `pip install 'hpc-train\[zstd\]'`"):
        written(tmp_path, ".tar.zst")
