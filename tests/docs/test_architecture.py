"""docs/architecture.md names packages and modules that exist, and all packages."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

from hpc_train.config.keys import all_keys

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "hpc_train"
TEXT = (REPOSITORY / "docs/architecture.md").read_text()


def _exists(name: str) -> bool:
    """Tell whether ``name``, ``package.module`` or ``package/module.py``, leads to a module or into one."""
    parts = name.removeprefix("hpc_train.").removesuffix(".py").replace("/", ".").strip(".").split(".")
    return any(
        (place := PACKAGE.joinpath(*parts[:length])).is_dir() or place.with_suffix(".py").exists()
        for length in range(2, len(parts) + 1)
    )


def test_every_module_that_the_page_names_exists() -> None:
    packages = "|".join(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())
    named = set(re.findall(rf"(?<![\w./])((?:{packages})[./][a-z_][\w./]*)", TEXT))
    assert len(named) > 40
    keys = {".".join(path) for path in all_keys()}
    wrong = {name for name in named if not _exists(name) and name not in keys | {"run.json"}}
    assert not wrong, wrong


def test_every_package_has_a_row_and_a_layer() -> None:
    (table,) = re.findall(r"\| package \| owns .*?\n\n", TEXT, re.DOTALL)
    rows = set(
        re.findall(r"`(\w+)`", "\n".join(row.split("|")[1] for row in table.splitlines() if "|" in row))
    )
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    modules = packages | {path.stem for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}
    assert rows == modules
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    layers = {name.strip() for layer in contracts[0]["layers"] for name in layer.split("|")}
    assert layers - {"__main__"} == modules


_SCHEDULER = re.compile(r"slurm|sbatch|squeue|scancel|scontrol|srun|sacct|sinfo", re.IGNORECASE)


def test_commands_name_no_scheduler() -> None:
    """A launcher plug-in for another scheduler gets the same commands and the same messages."""
    named = [
        f"{file.name}:{number}: {line.strip()}"
        for package in ("cli", "report", "plan")
        for file in sorted(PACKAGE.joinpath(package).glob("*.py"))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if _SCHEDULER.search(line)
    ]
    assert named == []


#: The protocol of each plug-in package; the same step for data sets and models, and the arguments of both; a
#: provider of both; a model's facts asked for and found; a rank's process as Slurm and as training see it.
_SHARED_NAMES = {"base", "building", "arguments", "torchvision", "huggingface", "model_facts", "rank"}


def test_a_module_name_means_one_thing() -> None:
    names = Counter(path.stem for path in PACKAGE.rglob("*.py") if not path.name.startswith("__"))
    assert {name for name, count in names.items() if count > 1} <= _SHARED_NAMES
