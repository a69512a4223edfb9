"""Every code block of README.md and docs/ is true: files validate, commands do what the page shows."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_train.experiment.config.marked_yaml import read_document
from hpc_train.experiment.plan.staged_file import load_stages
from hpc_train.experiment.validate.loading import load
from hpc_train.launchers.slurm import profiles
from tests.docs.pages import (
    NOTEBOOKS,
    PAGES,
    REPOSITORY,
    Block,
    Session,
    blocks,
    missing_lines,
    play,
    sessions,
)
from tests.docs.scenes import Stage
from tests.slurm.cluster import Cluster

LANGUAGES = {"yaml", "console", "python", "toml", "json", "text"}
SESSIONS = [session for page in PAGES for session in sessions(page)]
ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]
#: What a block that shows only some keys is laid over.
WHOLE_FILE = """\
name: whole
task: classification
model: {name: timm/test_resnet}
data: {name: digits}
optimization: {epochs: 5, global_batch_size: 512, micro_batch_size: 8, optimizer: {name: sgd, lr: 0.1}}
"""


def of(*languages: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for block in ALL_BLOCKS if block.language in languages]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_fence_has_a_language_that_is_checked(page: Path) -> None:
    fences = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("```")]
    found = blocks(page)
    assert len(fences) == 2 * len(found), "a fence is not closed"
    # A diagram may be in a fence without a language, as text.
    assert {block.language for block in found} <= LANGUAGES | {""}


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_is_an_experiment_or_a_part_of_one(block: Block, tmp_path: Path) -> None:
    shown = read_document(block.text.encode())
    assert shown.data is not None and not shown.problems, shown.problems
    if block.file is not None and block.file.startswith("profiles/"):
        (tmp_path / "profile.yaml").write_text(block.text)
        profiles.read(tmp_path / "profile.yaml")
        return
    whole = {"name": "x"} if "program" in shown.data else read_document(WHOLE_FILE.encode()).data
    assert whole is not None
    file = tmp_path / "exp.yaml"
    file.write_text(block.text if "name" in shown.data else yaml.safe_dump(laid_over(whole, shown.data)))
    if "stages" in shown.data:
        load_stages(file)
    else:
        load(file, check_names=False)


def laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: laid_over(below[key], above[key]) for key in below.keys() & above.keys() if is_nested(above[key])
    }
    return below | above | both


def is_nested(value: object) -> bool:
    return isinstance(value, dict)


@pytest.mark.parametrize("block", of("toml"))
def test_toml_is_that_of_the_plugin_example(block: Block) -> None:
    example = tomllib.loads((REPOSITORY / "tests/plugin_example/pyproject.toml").read_text())
    shown = tomllib.loads(block.text)["project"]["entry-points"]
    assert shown == example["project"]["entry-points"]


@pytest.mark.parametrize("block", of("json"))
def test_json_can_be_read(block: Block) -> None:
    assert isinstance(json.loads(block.text), dict)


@pytest.mark.slow
@pytest.mark.parametrize("block", [each for each in of("python") if each.values[0].page not in NOTEBOOKS])
def test_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a script without the launcher saves there
    file = tmp_path / (block.file or "block.py")
    file.write_text(block.text, encoding="utf-8")
    assert runpy.run_path(str(file)), "it defines nothing"


@pytest.mark.slow
@pytest.mark.parametrize("session", [each for each in SESSIONS if not each.on_slurm], ids=str)
def test_commands_do_what_the_page_shows(session: Session, tmp_path: Path) -> None:
    for where, command, code, printed in play(session, tmp_path):
        assert code == command.exit_code, f"{where}: {command.line}\n{printed}"
        assert not missing_lines(command.shown, printed), f"{where}: {command.line}\n{printed}"


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("session", [each for each in SESSIONS if each.on_slurm], ids=str)
def test_commands_on_slurm_do_what_the_page_shows(session: Session, cluster: Cluster, tmp_path: Path) -> None:
    """On the test cluster, in a folder that has the repository's examples."""
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples")
    stage = Stage(cluster, tmp_path)
    for where, command, code, printed in play(session, tmp_path, stage.wait_until):
        stage.go_on()
        account = f"{where}: {command.line}\n{printed}\n{stage.account()}"
        assert code == command.exit_code, account
        assert not missing_lines(command.shown, printed), account


def test_the_reference_lists_the_keys_of_the_schema() -> None:
    maker = runpy.run_path(str(REPOSITORY / "docs" / "make_reference.py"))
    page = maker["PAGE"].read_text(encoding="utf-8")
    assert page == maker["updated"](page), "run `python docs/make_reference.py`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    for target, heading in links(page):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name}: {target}"
        if heading:
            assert heading in headings(file), f"{page.name}: {target}#{heading}"


def links(page: Path) -> list[tuple[str, str]]:
    """Return (path, heading) of every link that does not leave the repository."""
    parts = [part.partition(")")[0] for part in page.read_text(encoding="utf-8").split("](")[1:]]
    return [
        (path, heading) for path, _, heading in (part.partition("#") for part in parts) if ":" not in path
    ]


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    lines = [
        line.lstrip("#").strip().lower() for line in page.read_text().splitlines() if line.startswith("#")
    ]
    return {"".join(c for c in line.replace(" ", "-") if c.isalnum() or c in "-_") for line in lines}


_TOP = "tests|hpc_train|docs|slurm_templates|envs|examples|benchmarks"
#: No pattern, and no folder of a run or a plug-in: ``…/tests/``, ``my_tests/``.
_PATH = re.compile(rf"(?<![\w/.…-])(?:\.\./)?((?:{_TOP})/[\w./*<{{-]*[\w/])")


def test_every_path_that_a_page_names_exists() -> None:
    files = [*PAGES, REPOSITORY / "tests/faults/catalogue.yaml"]
    named = {(file.name, path) for file in files for path in _PATH.findall(file.read_text())}
    assert len(named) > 40
    plain = {(page, path) for page, path in named if not set("*<{") & set(path)}
    assert {(page, path) for page, path in plain if not (REPOSITORY / path).exists()} == set()
