"""The environments of ``envs/``: they copy what the package needs, pin what it depends on, and resolve."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.wheels import REPOSITORY, build, templates, templates_of_the_repository

ENVS = REPOSITORY / "envs"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
IMAGES = ("Dockerfile", "apptainer.def")
CONSTRAINTS = ("constraints-cpu.txt", "constraints-cuda.txt")


def copied(image: str) -> list[str]:
    """Return the paths of the repository that an image is made from."""
    text = (ENVS / image).read_text()
    if image == "Dockerfile":
        commands = [shlex.split(line) for line in text.splitlines() if line.startswith("COPY ")]
        return [path for words in commands for path in words[1:-1]]
    files = text.partition("%files\n")[2].partition("\n\n")[0]
    return [line.split()[0] for line in files.splitlines()]


def pinned(constraints: str) -> dict[str, str]:
    lines = [line for line in (ENVS / constraints).read_text().splitlines() if line[:1] not in {"#", ""}]
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines), "each package once"
    return pins


def test_images_copy_all_that_the_package_is_made_of_and_install_it_alike() -> None:
    paths = copied("Dockerfile")
    assert sorted(paths) == sorted(copied("apptainer.def"))
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []
    links = [path.resolve() for path in (REPOSITORY / "hpc_train").rglob("*") if path.is_symlink()]
    linked = {str(path.relative_to(REPOSITORY)) for path in links}
    assert linked, "slurm_templates at least"
    needed = {"pyproject.toml", "hpc_train", "envs", PROJECT["project"]["readme"], *linked}
    assert needed | set(PROJECT["project"]["license-files"]) <= set(paths)
    for image in IMAGES:
        text = (ENVS / image).read_text()
        assert re.findall(r"envs/install.sh (\w+)", text) == ["dependencies", "package"], image
        assert not re.search(r"^ *(RUN )?(apt-get|pip) ", text, re.MULTILINE), image


@pytest.mark.slow
def test_an_image_installs_templates_and_profiles(tmp_path: Path) -> None:
    """The wheel that pip builds from the copied files alone."""
    source = tmp_path / "source"
    source.mkdir()
    for path in copied("Dockerfile"):
        if (REPOSITORY / path).is_dir():
            shutil.copytree(REPOSITORY / path, source / path, symlinks=True)
        else:
            shutil.copy(REPOSITORY / path, source / path)
    build(source, tmp_path / "dist", "--wheel")
    (wheel,) = (tmp_path / "dist").iterdir()
    assert templates(wheel) == templates_of_the_repository()


@pytest.mark.parametrize("constraints", CONSTRAINTS)
def test_constraints_pin_every_dependency_at_a_version_that_it_allows(constraints: str) -> None:
    pins = pinned(constraints)
    for text in PROJECT["project"]["dependencies"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[requirement.name].partition("+")[0]), text


def test_constraints_differ_by_pytorchs_build_alone() -> None:
    cpu, cuda = map(pinned, CONSTRAINTS)
    assert {name for name in cuda if cpu.get(name) != cuda[name]} == {
        "torch", "torchvision", "triton", *(name for name in cuda if re.match("nvidia-|cuda-", name))
    }  # fmt: skip
    assert {name: pin.partition("+")[0] for name, pin in cpu.items()}.items() <= cuda.items()


def test_the_conda_environment_installs_this_checkout_on_a_python_that_it_allows() -> None:
    environment = yaml.safe_load((ENVS / "environment.yaml").read_text())
    python, pip, options = environment["dependencies"]
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(python.partition("=")[2])
    assert pip == "pip"
    # conda runs pip in the file's folder.
    assert [ENVS / option.split()[1] for option in options["pip"]] == [ENVS / CONSTRAINTS[1], ENVS / ".."]
    assert (ENVS / ".." / "pyproject.toml").is_file()


@pytest.mark.slow
@pytest.mark.soak
def test_environments_resolve_or_build_where_this_machine_can() -> None:
    words = ["bash", str(ENVS / "check.sh"), sys.executable]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
    states = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert states.keys() == {*CONSTRAINTS, "environment.yaml", *IMAGES}
