"""``make build``: the sdist is complete, and the wheel made from it works in a clean environment."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

import pytest

from hpc_train import __version__
from tests.wheels import (
    REPOSITORY,
    build,
    environment,
    install,
    report_files,
    run,
    templates,
    templates_of_the_repository,
)

pytestmark = pytest.mark.slow
EXAMPLE = REPOSITORY / "examples/slurm-digits.yaml"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of the files that git tracks, or would, and the wheel built from it."""
    source = tmp_path_factory.mktemp("source")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in run(listed, REPOSITORY).splitlines():
        if (REPOSITORY / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, source / name, follow_symlinks=False)
    build(source, source / "dist")
    return source / "dist"


def test_the_sdist_holds_the_package_its_templates_docs_and_examples(dist: Path) -> None:
    top = f"hpc_train-{__version__}"
    with tarfile.open(dist / f"{top}.tar.gz") as archive:
        members = {member.name.removeprefix(f"{top}/"): member for member in archive if not member.isdir()}
    assert all(member.isfile() for member in members.values()), "a link leads nowhere once it is unpacked"
    package = [path for path in (REPOSITORY / "hpc_train").rglob("*.*") if "__pycache__" not in path.parts]
    others = [REPOSITORY / name for name in ("README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml")]
    others += [*(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "examples").glob("*.yaml")]
    needed = {str(path.relative_to(REPOSITORY)) for path in (*package, *others) if path.is_file()}
    needed |= {f"hpc_train/launchers/slurm/templates/{name}" for name in templates_of_the_repository()}
    assert not needed - members.keys()
    assert not [name for name in members if name.startswith("tests/")]


def test_the_wheel_plans_a_slurm_job_in_an_empty_folder(dist: Path, tmp_path: Path) -> None:
    wheel = dist / f"hpc_train-{__version__}-py3-none-any.whl"
    assert templates(wheel) == templates_of_the_repository()
    assert report_files(wheel) == {"report.html.j2", "report.css", "dark.css", "report.js"}
    programs = environment(tmp_path / "environment")
    install(wheel, programs)
    empty = tmp_path / "empty"
    empty.mkdir()
    own = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(empty)}  # no PYTHONPATH

    def hpc_train(*words: str) -> str:
        return run(["hpc-train", *words], empty, own)

    assert hpc_train("--version") == f"hpc-train {__version__}\n"
    file = shutil.copy(EXAMPLE, empty / "exp.yaml")
    hpc_train("validate", file)
    script = hpc_train("plan", "--script", file, "slurm.profile=gres")
    assert "hpc_train_requeue() {" in script, "no templates"
    hpc_train("init", "--local", "--from", "cifar10-cpu", "-o", "recipe.yaml")
    assert (empty / "examples/cifar10_speed.py").is_file()
    package = run(["python", "-c", "import hpc_train; print(hpc_train.__file__)"], empty, own)
    assert Path(package).is_relative_to(tmp_path / "environment")
    names = "from hpc_train.experiment.config.synonyms import other_commands; print(other_commands()['ps'])"
    assert run(["python", "-c", names], empty, own) == "status\n", "no tables of other tools"
