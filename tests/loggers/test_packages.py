from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from hpc_train.loggers import sending
from hpc_train.loggers.sending import OLDEST, TooOldPackageError, check_version, in_a_line


def test_the_oldest_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    required = dict(match.groups() for line in lines if (match := re.match(r"([\w-]+)>=([\d.]+)$", line)))
    for tracker in OLDEST:
        package, oldest = OLDEST[tracker][-1]
        assert required[package] == oldest
        check_version(tracker)


@pytest.mark.parametrize(
    ("installed", "is_too_old"),
    [("0.12.21", True), ("0.19.99rc1", True), ("0.20", False), ("0.20.0rc1", False), ("1.0+cu12", False)],
)
def test_an_old_package_is_named(monkeypatch: pytest.MonkeyPatch, installed: str, is_too_old: bool) -> None:
    monkeypatch.setattr(sending, "version", lambda name: installed)
    if not is_too_old:
        check_version("wandb")
        return
    with pytest.raises(TooOldPackageError) as raised:
        check_version("wandb")
    told = f"wandb {installed} is too old; type pip install -U 'wandb>=0.20'"
    assert in_a_line(raised.value) == told
