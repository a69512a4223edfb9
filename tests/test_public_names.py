"""The public names: those of ``hpc_train`` and ``hpc_train.plugins``; users import nothing else."""

from __future__ import annotations

import inspect
import re
import typing
from pathlib import Path

import pytest

import hpc_train
from hpc_train import plugins
from tests.cli.commands import python
from tests.docs.pages import PAGES

REPOSITORY = Path(__file__).parents[1]
#: A name that is removed or renamed breaks the code of users: do it only with an entry in the changelog.
NAMES = "Run Runs load_model plan runs submit"
PLUGIN_NAMES = """
AccountingLauncher ArraySplit AttemptLauncher AwaitsCommit BadFileError Batch CheckRequest
ClusterLauncher DataConfig DataFacts DataInfo DataParallel DataSource DatasetBuilder Degrees Device
Distribution DrawsPictures EnvironmentRefusesError ExitCode Experiment ExperimentPaths FileSplit
Finding ForecastLauncher Forward Job JobForecast JobSection JobUsage KeyProblem KnowsDevices
LaunchRequest Launcher LimitsItself Logger LoggerContext LoggerOffError LogsImages ModelBuilder
ModelConfig MultiClusterLauncher NoSchedulerError ParallelConfig Piece Precision Problem RankContext
Ranks Row RunPaths RunStatus SearchMethod SearchRequest Section Split StartRequest StorageError
Strategy StrategyTraits TargetSpec Task TaskFacts TensorSplit Trial UsageError WithdrawsRows
as_given build_source drawing
"""
#: Code as users write it.
USERS_CODE = [
    *(page for page in PAGES if page.name not in {"architecture.md", "CONTRIBUTING.md"}),
    *(REPOSITORY / "examples").glob("*.py"),
    *(REPOSITORY / "tests" / "plugin_example").rglob("*.py"),
]
_IMPORTED = re.compile(r"^\s*(?:from|import) (hpc_train(?:\.[\w.]+)?)\b(?!_)", re.MULTILINE)


def test_the_public_names_are_these() -> None:
    assert hpc_train.__all__ == NAMES.split() and plugins.__all__ == PLUGIN_NAMES.split()
    for module, names in ((hpc_train, NAMES), (plugins, PLUGIN_NAMES)):
        assert all(getattr(module, name) is not None for name in names.split())
        with pytest.raises(AttributeError, match="has no attribute 'nosuch'"):
            module.nosuch  # noqa: B018


@pytest.mark.parametrize("file", USERS_CODE, ids=lambda file: file.name)
def test_users_code_imports_public_names_only(file: Path) -> None:
    imported = set(_IMPORTED.findall(file.read_text(encoding="utf-8")))
    assert imported <= {"hpc_train", "hpc_train.errors", "hpc_train.plugins"}


def test_types_in_the_methods_of_protocols_are_public() -> None:
    public = {name: getattr(plugins, name) for name in plugins.__all__}
    protocols = [value for value in public.values() if getattr(value, "_is_protocol", False)]
    assert len(protocols) > 15
    missing = {
        f"{protocol.__name__}.{name}: {kind.__name__}"
        for protocol in protocols
        for name, method in inspect.getmembers(protocol, inspect.isfunction)
        if method.__module__.startswith("hpc_train.")
        for kind in _classes(typing.get_type_hints(method, localns=public).values())
        if kind.__module__.startswith("hpc_train.") and kind not in public.values()
    }
    assert not missing


def _classes(hints: typing.Iterable[object]) -> typing.Iterator[type]:
    for hint in hints:
        if isinstance(hint, type):
            yield hint
        yield from _classes(typing.get_args(hint))


@pytest.mark.slow
def test_facts_of_plug_ins_import_no_torch() -> None:
    path = str(REPOSITORY / "tests" / "plugin_example")
    code = (
        f"import sys; sys.path.append({path!r}); import hpc_train_example.facts, hpc_train_example.traits\n"
    )
    done = python("-c", code + "import hpc_train_example.search; assert 'torch' not in sys.modules")
    assert done.code == 0, done.err
