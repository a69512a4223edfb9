"""The names for plug-ins: protocols that they implement, and the types that these use (docs/plugins.md).

A name of a module that needs torch is imported when it is used, so that a plug-in's facts for login nodes
import no torch.
"""

import importlib
from typing import TYPE_CHECKING

from hpc_train.errors import (
    BadFileError,
    EnvironmentRefusesError,
    ExitCode,
    NoSchedulerError,
    StorageError,
    UsageError,
)
from hpc_train.experiment.config.fields import Section
from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.config.schema import Experiment, Job
from hpc_train.experiment.config.sweep_sections import Distribution
from hpc_train.experiment.config.training_sections import DataConfig, ModelConfig, ParallelConfig
from hpc_train.experiment.data_facts.facts import DataFacts, TaskFacts
from hpc_train.experiment.plan.devices import Device
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.experiment.topology.strategy_traits import StrategyTraits
from hpc_train.launchers.base import (
    AccountingLauncher,
    AttemptLauncher,
    CheckRequest,
    ClusterLauncher,
    Finding,
    ForecastLauncher,
    JobForecast,
    JobSection,
    JobUsage,
    KeyProblem,
    KnowsDevices,
    Launcher,
    LaunchRequest,
    MultiClusterLauncher,
    Ranks,
    StartRequest,
)
from hpc_train.loggers.base import (
    AwaitsCommit,
    LimitsItself,
    Logger,
    LoggerContext,
    LoggerOffError,
    LogsImages,
    Row,
    WithdrawsRows,
)
from hpc_train.paths import ExperimentPaths, RunPaths
from hpc_train.run.run_status import RunStatus
from hpc_train.search.base import SearchMethod, SearchRequest, Trial

if TYPE_CHECKING:
    from hpc_train.training.datasets.base import (
        ArraySplit,
        DatasetBuilder,
        DataSource,
        FileSplit,
        Split,
        TensorSplit,
    )
    from hpc_train.training.datasets.building import build_source
    from hpc_train.training.datasets.types import Batch, DataInfo, TargetSpec
    from hpc_train.training.distributed.device import Precision
    from hpc_train.training.models.base import ModelBuilder
    from hpc_train.training.models.torchvision import as_given
    from hpc_train.training.strategies.base import Forward, Piece, RankContext, Strategy
    from hpc_train.training.strategies.data_parallel import DataParallel
    from hpc_train.training.tasks import drawing
    from hpc_train.training.tasks.base import DrawsPictures, Task

#: Module that needs torch → its names here.
_WITH_TORCH = {
    "hpc_train.training.datasets.base": "ArraySplit DataSource DatasetBuilder FileSplit Split TensorSplit",
    "hpc_train.training.datasets.building": "build_source",
    "hpc_train.training.datasets.types": "Batch DataInfo TargetSpec",
    "hpc_train.training.distributed.device": "Precision",
    "hpc_train.training.models.base": "ModelBuilder",
    "hpc_train.training.models.torchvision": "as_given",
    "hpc_train.training.strategies.base": "Forward Piece RankContext Strategy",
    "hpc_train.training.strategies.data_parallel": "DataParallel",
    "hpc_train.training.tasks.base": "DrawsPictures Task",
}

__all__ = [
    "AccountingLauncher", "ArraySplit", "AttemptLauncher", "AwaitsCommit", "BadFileError", "Batch",
    "CheckRequest", "ClusterLauncher", "DataConfig", "DataFacts", "DataInfo", "DataParallel",
    "DataSource", "DatasetBuilder", "Degrees", "Device", "Distribution", "DrawsPictures",
    "EnvironmentRefusesError", "ExitCode", "Experiment", "ExperimentPaths", "FileSplit", "Finding",
    "ForecastLauncher", "Forward", "Job", "JobForecast", "JobSection", "JobUsage", "KeyProblem",
    "KnowsDevices", "LaunchRequest", "Launcher", "LimitsItself", "Logger", "LoggerContext",
    "LoggerOffError", "LogsImages", "ModelBuilder", "ModelConfig", "MultiClusterLauncher",
    "NoSchedulerError", "ParallelConfig", "Piece", "Precision", "Problem", "RankContext", "Ranks",
    "Row", "RunPaths", "RunStatus", "SearchMethod", "SearchRequest", "Section", "Split", "StartRequest",
    "StorageError", "Strategy", "StrategyTraits", "TargetSpec", "Task", "TaskFacts", "TensorSplit",
    "Trial", "UsageError", "WithdrawsRows", "as_given", "build_source", "drawing",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name == "drawing":
        return importlib.import_module("hpc_train.training.tasks.drawing")
    for module, names in _WITH_TORCH.items():
        if name in names.split():
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
