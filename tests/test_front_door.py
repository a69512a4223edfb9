"""What a contributor meets first names what exists: CONTRIBUTING.md, hooks, workflow, package metadata."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


def loaded(path: str) -> Any:
    return yaml.safe_load((REPOSITORY / path).read_text())


WORKFLOW = loaded(".github/workflows/ci.yml")


def commands(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


def test_every_job_of_the_workflow_runs_a_target_of_the_makefile() -> None:
    targets = {
        name: re.findall(r"\bmake ([a-z-]+)$", commands(job)) for name, job in WORKFLOW["jobs"].items()
    }
    assert targets == {
        "lint": ["lint"], "tests": ["test"], "slurm": ["test"], "docs": ["docs"], "package": ["build"]
    }  # fmt: skip
    assert {target for each in targets.values() for target in each} <= TARGETS


def test_the_workflow_tests_all_pythons_and_the_oldest_and_newest_torch() -> None:
    matrix = WORKFLOW["jobs"]["tests"]["strategy"]["matrix"]
    prefix = "Programming Language :: Python :: "
    named = [each.removeprefix(prefix) for each in PROJECT["classifiers"] if each.startswith(prefix)]
    assert matrix["python"] == named
    assert all(SpecifierSet(PROJECT["requires-python"]).contains(python) for python in named)
    torch = next(each for each in map(Requirement, PROJECT["dependencies"]) if each.name == "torch")
    [oldest] = [each.version for each in torch.specifier if each.operator == ">="]
    assert matrix["torch"] == [f"{oldest}.*", "newest"]


def test_slurm_must_be_there_where_the_workflow_tests_it() -> None:
    job = WORKFLOW["jobs"]["slurm"]
    assert job["env"]["HPC_TRAIN_REQUIRE_SLURM"] and job["container"]["image"].startswith("debian:")


def test_hooks_are_tools_of_the_dev_extra_and_download_nothing() -> None:
    [source] = loaded(".pre-commit-config.yaml")["repos"]
    assert source["repo"] == "local"
    for hook in source["hooks"]:
        program = Path(hook["entry"].split()[0])
        assert hook["language"] == "system" and program.parent == Path(".venv/bin")
        assert (Path(sys.executable).parent / program.name).exists(), f"make install does not bring {program}"


@pytest.mark.parametrize(
    "page", ["CONTRIBUTING.md", "README.md", "SECURITY.md", ".github/pull_request_template.md"]
)
def test_targets_and_paths_that_a_page_names_exist(page: str) -> None:
    text = (REPOSITORY / page).read_text()
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= TARGETS
    paths = re.findall(r"`((?:hpc_train|tests|docs|examples)/[\w./-]+)`", text)
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []


def test_the_citation_and_templates_are_yaml_with_what_github_needs() -> None:
    citation = loaded("CITATION.cff")
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}
    assert citation["license"] == PROJECT["license"]
    for form in ("bug", "feature"):
        template = loaded(f".github/ISSUE_TEMPLATE/{form}.yml")
        assert template.keys() >= {"name", "description", "body"}
        assert all(field["attributes"]["label"] for field in template["body"])
