"""The folder in which a program works: the snapshot's files, the outputs, links to the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.run.code.snapshot import link
from hpc_train.workloads.supervisor import make_working_folder
from tests.run.code.trees import take, work_tree, write
from tests.run.runs import small_run


@pytest.mark.parametrize("is_later_first", [False, True])
def test_changed_files_stay_until_the_run_gets_another_snapshot(tmp_path: Path, is_later_first: bool) -> None:
    """Whichever name the newer snapshot has."""
    tree, root = work_tree(tmp_path / "tree", "a.py"), tmp_path / "runs/.code"
    snapshots = [take(root, tree)]
    write(tree, "b.py")
    snapshots = sorted([*snapshots, take(root, tree)], reverse=is_later_first)
    paths = small_run(root.parent)
    link(paths, snapshots[0])
    script = make_working_folder(paths, []) / "a.py"
    script.write_text("changed")
    assert make_working_folder(paths, []) == script.parent and script.read_text() == "changed"
    link(paths, snapshots[1])
    make_working_folder(paths, [])
    assert script.read_text() == "a.py"
