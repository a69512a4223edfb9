"""A snapshot: one per content, whole, private, first on the ranks' path."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from hpc_train.errors import StorageError, UserError
from hpc_train.paths import RunPaths
from hpc_train.run.code import snapshot
from hpc_train.run.code.code_files import Selection, package_files
from hpc_train.run.code.snapshot import Code, check_owner, differences, link, linked, search_path
from hpc_train.run.create import create_run, note_code, was_submitted_here
from hpc_train.run.files import read_json
from tests.run.code.trees import git, take, work_tree, write
from tests.run.runs import small_experiment, small_run


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return work_tree(tmp_path / "work", "a.py", "sub/b.py")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs" / ".code"


def manifest(folder: Path) -> dict[str, object]:
    found = read_json(folder / "snapshot.json")
    assert found is not None
    return found


def test_a_snapshot_holds_package_tree_and_what_they_are(tree: Path, root: Path) -> None:
    (tree / "sub" / "b.py").chmod(0o755)
    (tree / "l.py").symlink_to("a.py")
    write(tree, ".env")
    folder = take(root, tree / "sub")
    assert folder.parent == root
    assert (folder / "tree" / "a.py").read_text() == "a.py"
    assert (folder / "tree" / "l.py").readlink() == Path("a.py")
    assert (folder / "package" / "hpc_train" / "__init__.py").is_file()
    assert os.access(folder / "tree" / "sub" / "b.py", os.X_OK)
    told = manifest(folder)
    assert (told["version"], told["content"], told["cwd"]) == (1, folder.name, "sub")
    assert (told["commit"], told["dirty"]) == (git(tree, "rev-parse", "HEAD"), True)
    assert told["links"] == {"tree/l.py": "a.py"}
    assert told["left_out"] == {".env": "may contain a secret"}
    assert len(folder.name) == 16
    files = told["files"]
    assert isinstance(files, dict)
    assert files["tree/a.py"] == hashlib.sha256(b"a.py").hexdigest()
    assert len(files) == len(package_files()) + 2


def test_without_git_there_is_no_commit(tmp_path: Path, root: Path) -> None:
    write(tmp_path / "plain", "a.py")
    told = manifest(take(root, tmp_path / "plain"))
    assert (told["commit"], told["dirty"], told["cwd"]) == (None, None, "")


def test_the_same_content_is_one_snapshot_that_is_not_touched_again(tree: Path, root: Path) -> None:
    """But for its folder's time: ``clean`` sees that it was asked for."""
    first = take(root, tree)
    os.utime(first, (0, 0))
    before = {path: path.lstat().st_mtime_ns for path in [root, *root.rglob("*")]}
    git(tree, "commit", "-q", "--allow-empty", "-m", "two")
    os.utime(tree / "a.py")
    assert take(root, tree) == first
    after = {path: path.lstat().st_mtime_ns for path in [root, *root.rglob("*")]}
    assert after.pop(first) > before.pop(first)
    assert after == before


@pytest.mark.parametrize("change", ["content", "name", "mode", "link", "cwd"])
def test_any_change_is_another_snapshot(tree: Path, root: Path, change: str) -> None:
    (tree / "link").symlink_to("a.py")
    first, cwd = take(root, tree), tree
    if change == "content":
        (tree / "a.py").write_text("b.py")
    elif change == "name":
        (tree / "a.py").rename(tree / "c.py")
    elif change == "mode":
        (tree / "a.py").chmod(0o755)
    elif change == "link":
        (tree / "link").unlink()
        (tree / "link").symlink_to("sub/b.py")
    else:
        cwd = tree / "sub"
    assert take(root, cwd) != first


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_the_owner_can_read_or_write_it(tree: Path, root: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = take(root, tree)
    finally:
        os.umask(before)
    for path in [root, folder, *folder.rglob("*")]:
        assert stat.S_IMODE(path.lstat().st_mode) & 0o077 == 0, path
        assert path.is_dir() or stat.S_IMODE(path.lstat().st_mode) == 0o400
    check_owner(folder)


def _take(root: str, cwd: str) -> str:
    return str(take(Path(root), Path(cwd)))


@pytest.mark.slow
def test_many_that_take_it_at_once_get_the_same_whole_one(tree: Path, root: Path) -> None:
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        taken = set(pool.map(_take, [str(root)] * 16, [str(tree)] * 16))
    (folder,) = taken
    assert [str(path) for path in root.iterdir()] == [folder]
    assert take(root, tree) == Path(folder)


def test_a_failed_snapshot_leaves_nothing(tree: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hpc_train.run.files.write_json", fail)
    with pytest.raises(OSError, match=f"No space left on device: '{root}'"):
        take(root, tree)
    assert not any(root.iterdir())


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_damaged_snapshot_is_reported_and_not_used(tree: Path, root: Path, is_gone: bool) -> None:
    """Blocks that a power cut left empty, or an edit of the snapshot."""
    file = take(root, tree) / "tree" / "a.py"
    file.chmod(0o600)
    file.unlink() if is_gone else file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(StorageError, match=r"tree/a\.py: differs from what was written there; move .* away"):
        take(root, tree)


def test_files_are_synced_first(tree: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = set[str]()

    def note(descriptor: int) -> None:
        synced.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    monkeypatch.setattr(os, "fsync", note)
    folder = take(root, tree)
    names = {path.rpartition(f"{folder.name}.")[2].partition("/")[2] for path in synced}
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_symlink()}
    assert files - {"snapshot.json"} <= names


def test_a_changed_file_is_read_again(tree: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    real = snapshot._read

    def read(selection: Selection) -> Code:
        code = real(selection)
        if not reads:
            (tree / "sub" / "b.py").write_text("half of it came later")
        reads.append(selection)
        return code

    monkeypatch.setattr(snapshot, "_read", read)
    assert (take(root, tree) / "tree" / "sub" / "b.py").read_text() == "half of it came later"
    assert len(reads) == 2


def test_a_file_that_keeps_changing(tree: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = snapshot._read_file

    def read_file(path: Path) -> bytes:
        if path.name == "a.py":
            with path.open("a") as file:
                file.write("\nmore")
        if path.name == "b.py":
            path.unlink(missing_ok=True)
        return real(path)

    monkeypatch.setattr(snapshot, "_read_file", read_file)
    folder = take(root, tree)
    assert (folder / "tree" / "a.py").read_text() == "a.py" + 3 * "\nmore"
    assert not (folder / "tree" / "sub").exists()


def test_an_unreadable_file_is_skipped(tree: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = snapshot._read_file

    def read_file(path: Path) -> bytes:
        if path.name == "a.py":
            raise PermissionError(13, "Permission denied")  # root may read all
        return real(path)

    monkeypatch.setattr(snapshot, "_read_file", read_file)
    assert manifest(take(root, tree))["left_out"] == {"a.py": "Permission denied"}


def test_names_of_odd_bytes_survive(tmp_path: Path, root: Path) -> None:
    name = os.fsdecode(b"latin\xe9\n.py")
    folder = take(root, work_tree(tmp_path / "work", name))
    assert (folder / "tree" / name).is_file()
    assert not differences(folder, take(root, tmp_path / "work"))


def test_a_run_leads_to_its_snapshot_wherever_all_of_it_is_moved(tree: Path, root: Path) -> None:
    folder = take(root, tree / "sub")
    paths = RunPaths(root.parent / "small" / "abc")
    assert create_run(paths, small_experiment(), "abc", 10, snapshot=folder)
    assert paths.code.readlink() == Path("../../.code") / folder.name
    parts = ["package", "tree/sub", "tree"]
    assert search_path(paths) == [str(folder / part) for part in parts]
    moved = root.parent.rename(root.parent.with_name("moved"))
    assert linked(RunPaths(moved / "small" / "abc")) == moved / ".code" / folder.name


def test_run_json_names_code_and_attempt(tree: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    first = take(root, tree)
    paths = RunPaths(root.parent / "small" / "abc")
    create_run(paths, small_experiment(), "abc", 10, snapshot=first)
    code = {
        "commit": git(tree, "rev-parse", "HEAD"),
        "dirty": False,
        "snapshot": first.name,
        "folder": str(tree),
    }
    assert (read_json(paths.run) or {})["code"] == code
    assert was_submitted_here(paths)
    (tree / "a.py").write_text("2")
    second = take(root, tree)
    link(paths, second)
    note_code(paths, second, 1)
    now = code | {"dirty": True, "snapshot": second.name, "earlier": [code | {"until_attempt": 0}]}
    assert (read_json(paths.run) or {})["code"] == now
    assert linked(paths) == second
    monkeypatch.chdir(tree / "sub")
    assert not was_submitted_here(paths)


def test_a_snapshot_that_is_gone_is_an_error(root: Path) -> None:
    paths = small_run(root.parent)
    assert (linked(paths), search_path(paths)) == (None, []), "it has none"
    link(paths, root / "0123456789abcdef")
    with pytest.raises(StorageError, match=r"is gone; .*`hpc-train resume abc --code new`"):
        search_path(paths)
    paths.code.unlink()
    paths.code.symlink_to(paths.code.name)  # leads to itself
    with pytest.raises(StorageError, match=r"is gone; "):
        search_path(paths)


def test_a_file_leads_to_the_snapshot_where_links_are_refused(
    tree: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, paths = take(root, tree), small_run(root.parent)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    link(paths, folder)
    assert not paths.code.is_symlink()
    assert linked(paths) == folder


def test_a_run_reached_by_a_link_finds_its_snapshot(tree: Path, root: Path, tmp_path: Path) -> None:
    paths = small_run(root.parent)
    folder = take(root, tree)
    link(paths, folder)
    (tmp_path / "short").symlink_to(paths.folder)
    assert linked(RunPaths(tmp_path / "short")) == folder


def test_a_copy_of_a_run_with_links_followed_keeps_its_code(tree: Path, root: Path, tmp_path: Path) -> None:
    paths = small_run(root.parent)
    folder = take(root, tree)
    link(paths, folder)
    copy = RunPaths(shutil.copytree(paths.folder, tmp_path / "copied" / "small" / "abc"))
    assert search_path(copy) == [str(copy.code / part) for part in ("package", "tree")]
    assert snapshot.content_of(copy.code) == folder.name
    check_owner(copy.code)
    link(copy, take(copy.siblings.snapshots, tree))
    assert linked(copy) == tmp_path / "copied" / ".code" / folder.name
    assert not [path for path in copy.folder.iterdir() if path.name.startswith(".")]


def test_modules_come_from_the_snapshot_and_nothing_from_here(tree: Path, root: Path) -> None:
    paths = small_run(root.parent)
    (tree / "a.py").write_text("value = 'old'")
    (tree / "sub" / "b.py").write_text("")
    link(paths, take(root, tree / "sub"))
    (tree / "a.py").write_text("value = 'new'")
    write(tree / "sub", "later.py")
    script = (
        "import json, importlib.util, a, b, hpc_train; find = importlib.util.find_spec; print(json.dumps("
    )
    script += "[a.value, b.__file__, hpc_train.__file__, find('later') is None]))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(search_path(paths)), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tree / "sub", env=environment, capture_output=True, check=True
    )
    value, sub, package, is_unknown = json.loads(done.stdout)
    assert (value, is_unknown) == ("old", True)
    assert Path(sub).is_relative_to(root)
    assert Path(package).is_relative_to(root)
    check_owner(linked(paths) or root)  # with what Python has cached there


def test_a_colon_in_the_path_is_refused(tree: Path, tmp_path: Path) -> None:
    paths = small_run(tmp_path / "a:b")
    link(paths, take(tmp_path / "a:b" / ".code", tree))
    with pytest.raises(UserError, match="rename it"):
        search_path(paths)


@pytest.mark.parametrize("name", [".", "tree", "tree/a.py", "snapshot.json", "package/hpc_train/__init__.py"])
@pytest.mark.parametrize("bit", [0o020, 0o002])
def test_what_others_may_write_is_not_run(tree: Path, root: Path, name: str, bit: int) -> None:
    folder = take(root, tree)
    check_owner(folder)
    (folder / name).chmod((folder / name).stat().st_mode | bit)
    with pytest.raises(UserError, match="others may write it"):
        check_owner(folder)
    with pytest.raises(UserError, match="others may write it"):
        take(root, tree)


def test_what_belongs_to_others_is_not_run(tree: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = take(root, tree)
    if os.geteuid() == 0:
        os.chown(folder / "tree" / "a.py", 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UserError, match="belongs to another user"):
        check_owner(folder)


def test_caches_of_imports_count_only_where_others_could_come_in(tree: Path, root: Path) -> None:
    folder = take(root, tree)
    cache = folder / "tree" / "__pycache__"
    cache.mkdir()
    cache.chmod(0o777)
    check_owner(folder)
    folder.chmod(0o711)
    with pytest.raises(UserError, match="__pycache__: group or others may write it"):
        check_owner(folder)


def test_differences_name_files_of_tree_and_package(tree: Path, root: Path) -> None:
    (tree / "link").symlink_to("a.py")
    first = take(root, tree)
    (tree / "a.py").write_text("2")
    (tree / "sub" / "b.py").unlink()
    (tree / "link").unlink()
    (tree / "link").symlink_to("c.py")
    write(tree, "c.py")
    code = snapshot.read(tree, [])
    code.files["package/hpc_train/registry.py"] = b""
    found = differences(first, code)
    assert found.changed == ["package/hpc_train/registry.py", "tree/a.py", "tree/link"]
    assert (found.added, found.removed) == (["tree/c.py"], ["tree/sub/b.py"])
    names = "a.py, link, c.py (new), sub/b.py (gone), hpc-train itself"
    assert found.words() == f"5 files differ: {names}"
    assert not differences(first, first)
    assert differences(first, first).words() == "nothing differs"


def test_many_differences_are_counted(tree: Path, root: Path) -> None:
    first = take(root, tree)
    write(tree, *(f"{number}.py" for number in range(7)))
    words = differences(first, take(root, tree)).words(" from it")
    assert words == "7 files differ from it: 0.py (new), 1.py (new), 2.py (new), 3.py (new), 4.py (new), …"


KEY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQ"


@pytest.mark.fault(45)
@pytest.mark.parametrize(
    "content",
    [
        f"-----BEGIN PRIVATE KEY-----\n{KEY}\n",
        f"-----BEGIN OPENSSH PRIVATE KEY-----\r\n{KEY}\r\n",
        f'{{"private_key": "-----BEGIN RSA PRIVATE KEY-----\\n{KEY}"}}',
        f'KEY = (\n    "-----BEGIN EC PRIVATE KEY-----\\n"\n    "{KEY}"\n)\n',
        f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{KEY}\n",
        "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n",
    ],
)
@pytest.mark.parametrize("name", ["notes.txt", "own.py"])
def test_a_private_key_is_never_in_a_snapshot(tree: Path, root: Path, name: str, content: str) -> None:
    (tree / name).write_bytes(content.encode())
    code = snapshot.read(tree, [])
    assert code.left_out == {name: "contains a private key"}
    folder = snapshot.place(root, code)
    written = [path.read_bytes() for path in (folder / "tree").rglob("*") if path.is_file()]
    assert not any(KEY.encode() in each or b"Proc-Type" in each for each in written)


@pytest.mark.parametrize(
    "content", ["if '-----BEGIN PRIVATE KEY-----' in text:\n", f"-----BEGIN PUBLIC KEY-----\n{KEY}\n"]
)
def test_code_that_looks_for_keys_is_kept(tree: Path, content: str) -> None:
    (tree / "own.py").write_text(content)
    assert snapshot.read(tree, []).left_out == {}


def test_a_snapshot_of_others_is_loaded_as_it_was(tree: Path, root: Path, tmp_path: Path) -> None:
    (tree / "sub" / "b.py").chmod(0o755)
    (tree / "sub" / "l.py").symlink_to("../a.py")
    folder = take(root, tree / "sub")
    code = snapshot.load(folder)
    assert code.content == folder.name and code.files["tree/a.py"] == b"a.py"
    placed = snapshot.place(tmp_path / "other", code)
    assert placed.name == folder.name and (placed / "tree" / "sub" / "l.py").read_text() == "a.py"


@pytest.mark.parametrize(
    "change",
    [
        {"cwd": "../.."},
        {"cwd": "/tmp"},
        {"search_path": ["sub/../../.."]},
        {"files": {"../../../etc/passwd": "0"}},
        {"files": {"other/a.py": "0"}},
        {"links": {"tree/l": "/etc/passwd"}},
        {"links": {"tree/l": "../../x"}},
        {"links": {"tree/l": "sub/../../x"}},
        {"links": {"tree/l": "sub/../a.py"}},
        {"links": {"../l": "a.py"}},
    ],
    ids=str,
)
def test_a_snapshot_that_leads_elsewhere_is_refused(
    change: dict[str, object], tree: Path, root: Path
) -> None:
    folder = take(root, tree)
    (folder / "snapshot.json").chmod(0o600)
    (folder / "snapshot.json").write_text(json.dumps(manifest(folder) | change))
    with pytest.raises(StorageError, match="leads out of the snapshot"):
        snapshot.load(folder)
