"""Which files of a folder are its code."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hpc_train.errors import UsageError
from hpc_train.run.code import code_files
from hpc_train.run.code.code_files import (
    Selection,
    commit_of,
    import_folders,
    listed_files,
    package_files,
    select,
)
from hpc_train.run.code.snapshot import check_owner
from tests.run.code.trees import git, work_tree, write


def files(folder: Path, *excluded: Path) -> set[str]:
    return set(select(folder, excluded).files) - {".gitignore"}


def test_tracked_and_untracked_files_count_but_not_ignored_or_deleted_ones(tmp_path: Path) -> None:
    tree = work_tree(tmp_path, "a.py", "b/c.txt", "gone.py", ignored="*.log\n/out/\n")
    write(tree, "new.py", "x.log", "out/y.py")
    (tree / "gone.py").unlink()
    assert files(tree) == {"a.py", "b/c.txt", "new.py"}


def test_the_tree_is_that_around_the_current_folder(tmp_path: Path) -> None:
    tree = work_tree(tmp_path / "t", "a.py", "sub/deep/b.py")
    selection = select(tree / "sub" / "deep", [])
    assert (selection.root, selection.cwd) == (tree, "sub/deep")
    assert set(selection.files) == {"a.py", "sub/deep/b.py"}


def test_runs_and_data_are_never_in_it_even_if_tracked(tmp_path: Path) -> None:
    tree = work_tree(tmp_path, "a.py", "runs/x/b.py", "sub/da[t]a *!/c.py", "runs.py")
    write(tree, "runs/new.py", "sub/da[t]a *!/new.py")
    assert files(tree, tree / "runs", tree / "sub" / "da[t]a *!") == {"a.py", "runs.py"}
    (tree / "linked").symlink_to("sub")
    assert files(tree / "sub", Path("../runs"), tree / "linked" / "da[t]a *!") == {"a.py", "runs.py"}


def test_an_excluded_folder_is_not_even_looked_into(tmp_path: Path) -> None:
    tree = work_tree(tmp_path, "a.py")
    write(tree, "da[t]a *!/b.py", "sub/da[t]a *!/c.py", "data x!/d.py")
    assert set(listed_files(tree, ["da[t]a *!"])) == {"a.py", "sub/da[t]a *!/c.py", "data x!/d.py"}


def test_a_data_folder_around_the_current_one_hides_nothing(tmp_path: Path) -> None:
    tree = work_tree(tmp_path, "sub/a.py")
    assert files(tree / "sub", tree, tmp_path.parent, Path()) == {"sub/a.py"}


def test_caches_and_virtual_environments_are_skipped(tmp_path: Path) -> None:
    tree = work_tree(tmp_path, "env/gym.py")
    write(tree, "__pycache__/a.pyc", "node_modules/b.js", "my/pyvenv.cfg", "my/lib/c.py", "wandb/run/d.py")
    write(tree, "conda/conda-meta/history", "conda/lib/e.py")
    assert files(tree) == {"env/gym.py"}


def test_submodules_and_clones_within_are_code_too(tmp_path: Path) -> None:
    library = work_tree(tmp_path / "lib", "module.py", ignored="*.log\n")
    tree = work_tree(tmp_path / "tree", "a.py")
    add = ["-c", "protocol.file.allow=always", "submodule", "add", "-q", str(library), "sub/lib"]
    git(tree, *add)
    write(work_tree(tree / "clone", "b.py", ignored="*.log\n"), "new.py", "x.log", "data/c.py")
    write(tree / "sub" / "lib", "new.py", "x.log")
    found = files(tree, tree / "clone" / "data") - {".gitmodules"}
    assert {path for path in found if not path.endswith(".gitignore")} == {
        "a.py", "sub/lib/module.py", "sub/lib/new.py", "clone/b.py", "clone/new.py",
    }  # fmt: skip


def test_a_submodule_that_is_not_checked_out_is_nothing(tmp_path: Path) -> None:
    tree = work_tree(tmp_path / "tree", "a.py")
    git(tree, "update-index", "--add", "--cacheinfo", f"160000,{git(tree, 'rev-parse', 'HEAD')},sub")
    (tree / "sub").mkdir()
    assert files(tree) == {"a.py"}


def test_without_git_code_and_its_settings_below_the_folder_count(tmp_path: Path) -> None:
    """A shell script or a file of DeepSpeed's settings is edited like code, while jobs wait."""
    write(tmp_path, "a.py", "b.yaml", "c.txt", ".hidden/d.py", "x/e.py", "runs/f.py", "x/data/g.py")
    write(tmp_path, "run.sh", "e.yml", "p.toml", "op.cu", "x/ds.json", "boxes/1.json", "x/api_key.json")
    (tmp_path / "large.json").write_bytes(bytes((1 << 20) + 1))
    write(tmp_path, "v/pyvenv.cfg", "v/h.py", "node_modules/i.py", "__pycache__/j.py")
    found = select(tmp_path, [tmp_path / "runs", Path("x/data")])
    settings = {"run.sh", "e.yml", "p.toml", "op.cu", "x/ds.json"}
    assert set(found.files) == {"a.py", "b.yaml", "x/e.py"} | settings
    assert (found.root, found.cwd) == (tmp_path, "")


def test_git_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = work_tree(tmp_path, "a.py", "b.txt")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert files(tree) == {"a.py"}


def test_a_walk_that_finds_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_files, "_MAX_WALKED", 3)
    write(tmp_path, "a.py", "b.txt", "c.txt")
    assert files(tmp_path) == {"a.py"}
    write(tmp_path, "d.txt")
    with pytest.raises(UsageError, match=r"more than 3 files and folders .*; start in the folder"):
        select(tmp_path, [])


#: Without any one pattern of the list at least one of these is taken for code.
SECRETS = [
    ".env", "a/.env.local", ".netrc", "x.pem", "X.PEM", "server.key", "id_rsa", "id_ed25519.pub",
    "credentials", "credentials.json", "a.p12", "kaggle.json", "wandb/settings", ".aws/config",
    "deep/.ssh/known_hosts", ".secrets", "secret.json", "token", "hf_token", "hf-token.txt", "api_key.txt",
    "wandb_key", "password.txt", "my-credentials.json", "gcp-key.json", "deploy_rsa", "rclone.conf",
    "terraform.tfstate", "prod.tfvars", "GITHUB_TOKEN", "db_passwd", "conf/api-keys.yaml", "accessKey.json",
    "aws_secret_access_key", ".envrc", "_netrc", ".git-credentials", ".npmrc", ".pypirc", ".pgpass",
    ".my.cnf", ".boto", ".s3cfg", ".dockercfg", ".htpasswd", ".vault-token", "client_secret_1.json",
    "my-service_account.json", "secrets.yaml", "a.pfx", "a.jks", "a.keystore", "a.kdbx", "a.ppk", "a.ovpn",
    "id_dsa", "id_ecdsa", "huggingface/token", "gcloud/x.json", ".gnupg/x", ".kaggle/x",
    ".docker/config.json", ".azure/x", ".kube/config", "prod.env",
    "credentialsdb", "client_secret2.json", "secrets.ts", "id_rsa.pub", "id_dsa.pub", "id_ecdsa.pub",
    "work_dsa", "work_ecdsa", "work_ed25519", "terraform.tfstate.backup", "prod.tfvars.json", "a.agekey",
    "a.gpg", "a.asc", "auth.json", ".gcloud/x", "db_pwd", "db_pw", "gh_pat",
    *(f"hf_token{suffix}" for suffix in (".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf")),
    *(f"{word}.db" for word in (
        "apikey", "apikeys", "accesskeys", "privatekey", "privatekeys", "passphrase", "passwords",
        "credential", "creds", "secrets",
    )),
    *(f"{first}-{last}.db" for last in ("key", "keys") for first in (
        "api", "access", "private", "signing", "ssh", "encryption",
    )),
]  # fmt: skip


@pytest.mark.fault(45)
def test_what_may_contain_a_secret_is_skipped_and_reported(tmp_path: Path) -> None:
    selection = select(work_tree(tmp_path, "a.py", *SECRETS), [])
    assert set(selection.files) == {"a.py"}
    assert selection.left_out == dict.fromkeys(SECRETS, "may contain a secret")


@pytest.mark.parametrize(
    "group",
    ["_SECRET_NAMES", "_SECRET_WORDS", "_SECRET_PAIRS", "_SECRET_LAST_WORDS", "_SETTINGS_SUFFIXES",
     "_SECRET_FOLDERS", "_SECRET_PATHS"],
)  # fmt: skip
def test_each_pattern_is_tested(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = getattr(code_files, group)
    untested = []
    for pattern in patterns:
        monkeypatch.setattr(code_files, group, type(patterns)(each for each in patterns if each != pattern))
        if all(code_files.is_secret(name) for name in SECRETS):
            untested.append(pattern)
    assert untested == []


@pytest.mark.parametrize(
    "name",
    ["credentials.py", "id_mapping.py", "keys.py", "environment.yaml", "a.keys", "tokenizer.py",
     "hotkeys.yaml", "tokenizer.json", "token_shards.py", "token_shards.yaml", "tokens.json", "keys.json",
     "secrets.py", "keypoints.json", "special_tokens_map.json", "docs/api_keys.md", "monkey.json",
     "token.py"],
)  # fmt: skip
def test_code_of_a_like_name_is_kept(tmp_path: Path, name: str) -> None:
    assert files(work_tree(tmp_path, name)) == {name}


def test_links_stay_within_the_selection(tmp_path: Path) -> None:
    write(tmp_path, "outside.py")
    tree = work_tree(tmp_path / "t", "pkg/a.py", "b/c.py", ignored="/ignored.py\n")
    write(tree, "ignored.py")
    targets = {
        "to_file.py": "pkg/a.py", "b/to_folder": str(tree / "pkg"), "to_link.py": "b/to_folder/a.py",
        "out.py": "../outside.py", "root": "/", "loop": "loop", "to_ignored.py": "ignored.py",
        "none": "nowhere",
    }  # fmt: skip
    for name, target in targets.items():
        (tree / name).symlink_to(target)
    selection = select(tree, [])
    assert selection.links == {
        "b/to_folder": "../pkg", "to_file.py": "pkg/a.py", "to_link.py": "pkg/a.py",
    }  # fmt: skip
    assert set(selection.left_out) == {"out.py", "root", "loop", "to_ignored.py", "none"}


def test_what_is_not_a_file_is_skipped(tmp_path: Path) -> None:
    write(tmp_path, "a.py")
    os.mkfifo(tmp_path / "pipe.py")
    selection = select(tmp_path, [])
    assert (set(selection.files), selection.left_out) == ({"a.py"}, {"pipe.py": "is not a file"})


def test_names_of_odd_bytes_are_files_like_others(tmp_path: Path) -> None:
    names = ["a b.py", "tab\there.py", "line\nbreak.py", '"quoted".py', os.fsdecode(b"latin\xe9.py"), "ü.py"]
    assert files(work_tree(tmp_path, *names)) == set(names)


def test_large_files_and_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = work_tree(tmp_path, "a.py")
    for name, size_mb in [("weights.pt", 17), ("x/y/big.bin", 3), ("x/y/small.bin", 1)]:
        write(tree, name)
        os.truncate(tree / name, size_mb << 20)
    selection = select(tree, [])
    assert selection.left_out == {"weights.pt": "17 MB, over 16 MB"}
    monkeypatch.setattr(code_files, "MAX_TOTAL_MB", 3)
    with pytest.raises(UsageError) as refused:
        select(tree, [])
    assert "takes at most 3 MB; the largest are x/y/big.bin (3.0 MB), x/y/small.bin (1.0 MB)" in str(
        refused.value
    )
    assert "add what is not code to .gitignore, or start in a folder" in str(refused.value)


def test_too_many_files_are_refused_by_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_files, "MAX_FILES", 4)
    tree = work_tree(tmp_path, "a.py", *(f"images/cats/x/{number}.png" for number in range(4)))
    with pytest.raises(
        UsageError, match=r"is 5 files, and a snapshot takes at most 4; most are in images/cats/ \(4"
    ):
        select(tree, [])


def test_nothing_that_a_repository_names_is_run(tmp_path: Path) -> None:
    tree = work_tree(tmp_path / "t", "a.py", "b.txt")
    ran = tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho $0 >> {ran}\ncat\n")
    program.chmod(0o700)
    for key in ("core.fsmonitor", "filter.own.clean", "filter.own.process", "core.sshCommand", "core.pager"):
        git(tree, "config", key, str(program))
    git(tree, "config", "filter.own.required", "true")
    (tree / ".gitattributes").write_text("* filter=own\n")
    (tree / "b.txt").write_text("ab.tx")  # as long as before, so that git must look
    assert files(tree) == {"a.py", "b.txt", ".gitattributes"}
    assert (commit_of(tree) or {})["dirty"] is True
    assert not ran.exists()
    subprocess.run(["git", "status"], cwd=tree, capture_output=True, check=False)
    assert ran.exists(), "the trap itself works"


def test_folders_of_local_modules_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = work_tree(tmp_path, "a.py", "src/lib.py", "editable/pkg/b.py", "cwd/c.py", "other/d.py")
    monkeypatch.setattr(sys, "path", ["", str(tree), str(tree / "src"), str(tree / ".venv"), "/usr/lib"])
    finder = ModuleType("__editable___pkg_finder")
    finder.MAPPING = {"pkg": str(tree / "editable" / "pkg")}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, finder.__name__, finder)
    monkeypatch.chdir(tree / "cwd")
    assert import_folders(select(tree / "cwd", [])) == ["src", "editable"]


def test_the_package_is_all_that_it_needs_and_no_cache() -> None:
    found = package_files()
    data = "hpc_train/training/datasets/sources/digits.npz"
    assert {"hpc_train/__init__.py", "hpc_train/py.typed", data} <= found.keys()
    assert not [path for path in found if path.endswith(".pyc")]


@pytest.mark.parametrize("listing", [lambda _: package_files(), check_owner])
def test_unreadable(
    listing: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "snapshot" / "cli").mkdir(parents=True)
    really = os.scandir

    def scandir(path: str) -> Any:
        if str(path).endswith("/cli"):
            raise OSError(errno.ESTALE, "Stale file handle", path)
        return really(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(OSError, match="Stale"):
        listing(tmp_path / "snapshot")


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "b.py")
    selection: Selection = select(tmp_path, [])
    assert not code_files.has_changed(selection)
    (tmp_path / "b.py").unlink()
    assert code_files.has_changed(selection)
