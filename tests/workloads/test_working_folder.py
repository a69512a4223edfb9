"""The folder in which a program works: the snapshot's files, the outputs, links to the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_train.experiment.config.program_section import ProgramConfig
from hpc_train.run.code.snapshot import link
from hpc_train.workloads.working_folder import make_working_folder
from tests.run.code.trees import take, work_tree, write
from tests.run.runs import change_facts, small_run

PROGRAM = ProgramConfig(command=["python"])


@pytest.mark.parametrize("is_later_first", [False, True])
def test_changed_files_stay_until_the_run_gets_another_snapshot(tmp_path: Path, is_later_first: bool) -> None:
    """Whichever name the newer snapshot has."""
    tree, root = work_tree(tmp_path / "tree", "a.py"), tmp_path / "runs/.code"
    snapshots = [take(root, tree)]
    write(tree, "b.py")
    snapshots = sorted([*snapshots, take(root, tree)], reverse=is_later_first)
    paths = small_run(root.parent)
    link(paths, snapshots[0])
    script = make_working_folder(paths, PROGRAM) / "a.py"
    script.write_text("changed")
    assert make_working_folder(paths, PROGRAM) == script.parent and script.read_text() == "changed"
    link(paths, snapshots[1])
    make_working_folder(paths, PROGRAM)
    assert script.read_text() == "a.py"


#: Files of earlier trials in the folder of `submit`, all ignored by git, and a file of the code.
TRIALS = ("out/ckpt.pt", "out/log", "deep/a/ckpt-1.pt", "deep/data", "src/ckpt.pt", "ckpt-9.pt", "data/x")


@pytest.mark.parametrize(("keys", "own"), [
    ({}, []),
    ({"outputs": ["out"]}, ["out/ckpt.pt", "out/log"]),
    ({"outputs": ["deep/a"]}, ["deep/a/ckpt-1.pt"]),
    ({"resume": {"if_exists": "out/ckpt.pt"}}, ["out/ckpt.pt", "out/log"]),
    ({"resume": {"if_exists": "deep/a/*.pt"}}, ["deep/a/ckpt-1.pt"]),
    ({"resume": {"if_exists": "deep/*/ckpt-*.pt"}}, ["deep/a/ckpt-1.pt", "deep/data"]),
    ({"resume": {"if_exists": "src/ckpt.pt"}}, ["src/ckpt.pt"]),
    ({"resume": {"if_exists": "*.pt"}}, ["ckpt-9.pt"]),
    ({"metrics": {"jsonl": "out/log"}}, ["out/ckpt.pt", "out/log"]),
])  # fmt: skip
def test_a_run_has_its_own_checkpoints_and_outputs(
    tmp_path: Path, keys: dict[str, Any], own: list[str]
) -> None:
    """Those of earlier trials in the folder of `submit` are neither resumed from nor written to."""
    tree = work_tree(tmp_path / "tree", "src/a.py", ignored="*\n")
    write(tree, *TRIALS)
    paths = small_run(tmp_path / "runs")
    link(paths, take(tmp_path / "runs/.code", tree))
    change_facts(paths, code={"folder": str(tree)})
    program = ProgramConfig.model_validate({"command": ["python"], **keys})
    for _ in range(2):
        work = make_working_folder(paths, program)
        assert sorted(file for file in TRIALS if not (work / file).exists()) == sorted(own)
        assert (work / "src/a.py").is_file()
        (work / "new").mkdir(exist_ok=True)  # by the program
        write(tree, "new/ckpt.pt")  # by a trial before the next attempt
        assert not (work / "new/ckpt.pt").exists()
    for output in program.outputs:
        assert (work / output).resolve() == work / output and (work / output).is_dir()
