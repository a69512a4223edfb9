"""docs/architecture.md names modules that exist, all packages, and the places to edit for a new part."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.experiment.config.keys import all_keys

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "hpc_train"
#: Packages that group others; the page calls a module ``validate.loading``, without the wing.
WINGS = (PACKAGE / "experiment", PACKAGE / "training")
TEXT = (REPOSITORY / "docs/architecture.md").read_text()


def _exists(name: str) -> bool:
    """Return True if ``name``, ``package.module`` or ``package/module.py``, leads to a module or into one."""
    parts = name.removeprefix("hpc_train.").removesuffix(".py").replace("/", ".").strip(".").split(".")
    return any(
        (place := root.joinpath(*parts[:length])).is_dir() or place.with_suffix(".py").exists()
        for root in (PACKAGE, *WINGS)
        for length in range(2, len(parts) + 1)
    )


def test_every_module_that_the_page_names_exists() -> None:
    packages = "|".join(path.parent.name for root in (PACKAGE, *WINGS) for path in root.glob("*/__init__.py"))
    named = set(re.findall(rf"(?<![\w./])((?:{packages})[./][a-z_][\w./]*)", TEXT))
    assert len(named) > 40
    keys = {".".join(map(str, path)) for path in all_keys()}
    wrong = {name for name in named if not _exists(name) and name not in keys | {"run.json"}}
    assert not wrong, wrong


def test_every_package_has_a_row_and_a_layer() -> None:
    tables = re.findall(r"\| package \| owns .*?\n\n", TEXT, re.DOTALL)
    cells = [row.split("|") for table in tables for row in table.strip().splitlines()[2:]]
    rows = {name for cell in cells for name in re.findall(r"`(\w+)`", cell[1])}
    starts = [re.findall(r"`([\w/]+\.py)`", cell[3]) for cell in cells]
    assert [start for start in starts if len(start) != 1 or not (PACKAGE / start[0]).is_file()] == []
    packages = {path.parent.name for root in (PACKAGE, *WINGS) for path in root.glob("*/__init__.py")}
    modules = {path.stem for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}
    assert rows == packages - {wing.name for wing in WINGS} | modules
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    named = [
        name.strip()
        for contract in contracts[:3]
        for layer in contract["layers"]
        for name in layer.split("|")
    ]
    assert set(named) - {"__main__", "main", "workload"} == packages | modules


def test_the_packages_of_training_import_none_of_its_own_modules() -> None:
    """Its modules, the loop and its surroundings, are the layer above its packages."""
    loop = {f"hpc_train.training.{path.stem}" for path in PACKAGE.glob("training/*.py")}
    wrong = {
        (module, by)
        for module, importers in _importers().items()
        if module in loop
        for by in importers
        if re.match(r"hpc_train\.training\.\w+\.", by)
    }
    assert not wrong


def _contributions() -> Iterator[tuple[str, str, list[str]]]:
    """Yield kind, example and places of each row of the contributor's table."""
    (table,) = re.findall(r"\| to add \| example .*?\n\n", TEXT, re.DOTALL)
    for row in table.strip().splitlines()[2:]:
        _, kind, example, places, _ = row.split("|")
        yield kind.strip(), example.strip().strip("`"), re.findall(r"`([\w/]+\.py)`", places)


@pytest.mark.parametrize(("kind", "example", "places"), [*_contributions()])
def test_a_part_is_named_in_the_places_of_its_row_only(kind: str, example: str, places: list[str]) -> None:
    """A module is imported or named nowhere else; a function or key is in each place."""
    assert places, kind
    sources = {str(file.relative_to(PACKAGE)): file.read_text() for file in PACKAGE.rglob("*.py")}
    if not example.endswith(".py"):
        word = re.compile(rf"\b{re.escape(example)}\b")
        assert [place for place in places if not word.search(sources[place])] == []
        return
    package, _, module = example.removesuffix(".py").replace("/", ".").rpartition(".")
    named = rf"hpc_train\.{package}\.{module}\b|from hpc_train\.{package} import [^\n]*\b{module}\b"
    assert {name for name, text in sources.items() if re.search(named, text)} - {example} == set(places)


@functools.cache
def _importers() -> dict[str, set[str]]:
    """Return by module of the package the modules that import it."""
    files = {
        ".".join(file.relative_to(REPOSITORY).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")
    }
    importers: dict[str, set[str]] = {name: set() for name in files}
    for name, file in files.items():
        for node in ast.walk(ast.parse(file.read_text())):  # one tree at a time: garbage is collected sooner
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    module = f"{node.module}.{alias.name}"
                    importers.get(module, importers.get(node.module, set())).add(name)
    return importers


def test_few_modules_serve_only_one_sibling() -> None:
    """Such a module is merged into its sibling, unless that would hold two subjects."""
    alone = [
        module
        for module, by in _importers().items()
        if len(by) == 1 and next(iter(by)).rpartition(".")[0] == module.rpartition(".")[0]
    ]
    assert 0 < len(alone) <= 40, sorted(alone)


_SCHEDULER = re.compile(r"slurm|sbatch|squeue|scancel|scontrol|srun|sacct|sinfo", re.IGNORECASE)


def test_commands_name_no_scheduler() -> None:
    """A launcher plug-in for another scheduler gets the same commands and the same messages."""
    named = [
        f"{file.name}:{number}: {line.strip()}"
        for package in ("cli", "report", "experiment/plan")
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
