"""What commands print with ``--json`` (a contract): one type per command.

``docs/make_json_page.py`` writes docs/json.md from these types and the comments above their fields; a test
compares real output with them. Nothing at run time needs them.
"""

from __future__ import annotations

from typing import Any, TypedDict

from hpc_train.cli.json_result_shapes import RESULT_SHAPES
from hpc_train.cli.run_row import RunRow


class Runs(TypedDict):
    """The runs that were meant, each as it is when the command ends."""

    version: int
    runs: list[RunRow]


class PlannedRunJson(TypedDict):
    """One run that a file plans; a number is null if it is not known before the start."""

    id: str
    #: The swept keys and their values.
    values: dict[str, Any]
    #: Of a range of nodes the maximum.
    ranks: int | None
    #: ``pipeline``, ``replicate``, ``shard`` and ``tensor``.
    degrees: dict[str, int] | None
    #: Of a pipeline: the stages, on all ranks.
    stages: int | None
    schedule: str | None
    #: The fraction of a step in which ranks of a pipeline wait, 0 to 1.
    bubble: float | None
    micro_batches: int | None
    #: Forward passes per rank and step.
    accumulation: int | None
    precision: str
    steps_per_epoch: int | None
    total_steps: int | None
    #: The upper bound given by the time limit; null without one.
    gpu_hours: float | None
    #: Predicted, of one rank; without ``memory`` nothing was predicted.
    peak_memory_gb: float | None
    #: In GB: ``parameters``, ``gradients``, ``optimizer``, ``activations`` and ``buffers``.
    memory: dict[str, float] | None
    #: Why activations are unknown, or that nothing was predicted.
    memory_problem: str | None
    #: What is assumed of data that can't be read here.
    memory_assumption: str | None
    #: Null for an unknown device.
    device_memory_gb: float | None
    fits: bool | None
    largest_micro_batch_size: int | None
    #: Of all ranks.
    flops_per_step: int | float | None
    #: GB that a rank sends per step: ``all_reduce_gb``, ``all_gather_gb``, ``reduce_scatter_gb``,
    #: ``tensor_gb`` (activations, among ranks that share layers), ``pipeline_gb``; and of their sum
    #: ``within_node_gb`` and ``between_nodes_gb``.
    communication: dict[str, float] | None


class RunCostJson(TypedDict):
    """What one run is predicted to take; null where nothing tells."""

    id: str
    duration_s: float | None
    step_s: float | None
    gpu_hours: float | None
    core_hours: float | None
    #: How many the time limit makes necessary.
    attempts: int | None
    #: The names of the runs whose times were used.
    measured_runs: list[str]


class CostJson(TypedDict):
    """What all runs together are predicted to take."""

    runs: list[RunCostJson]
    gpu_hours: float | None
    core_hours: float | None


class JobForecastJson(TypedDict):
    """When the scheduler would start a job."""

    #: The ids of its runs.
    runs: list[str]
    #: In UTC.
    earliest_start: str | None
    nodes: str | None
    note: str | None


class Plan(TypedDict):
    """What a file would start."""

    version: int
    #: The experiment's.
    name: str
    runs: list[PlannedRunJson]
    #: The batch script of each job.
    scripts: list[str]
    cost: CostJson
    #: Lines on jobs that would never start, or exceed the budget.
    refused: list[str]
    #: Null if no scheduler was asked.
    jobs: list[JobForecastJson] | None


class Validation(TypedDict):
    """Whether a file is valid: it is if there are no problems."""

    version: int
    file: str
    #: The experiment's name; null if the file is not valid.
    name: str | None
    #: How many runs it plans; null if it is not valid.
    runs: int | None
    #: As printed without ``--json``: position, key, rule and remedy.
    problems: list[str]
    #: The code of each problem, like ``batch.undivided``: it stays if the wording changes. ``other``: none.
    codes: list[str]


class FindingJson(TypedDict):
    """The result of one check."""

    #: ``error``, ``warning`` or ``ok``.
    level: str
    #: The check's name in the table of ``doctor``.
    check: str
    what: str
    #: Where it was read.
    source: str
    #: What happens to a run; empty for ``ok``.
    why: str
    remedy: str


class Diagnosis(TypedDict):
    """What would make runs fail."""

    version: int
    #: How many findings there are by level.
    counts: dict[str, int]
    #: Errors first.
    findings: list[FindingJson]


class PointJson(TypedDict):
    """A metric's value; null if it is NaN or infinite."""

    value: float | None
    step: int


class ComparedRun(TypedDict):
    """One run of a comparison."""

    id: str
    name: str
    path: str
    state: str
    #: By the keys of ``keys``.
    values: dict[str, Any]
    last: PointJson | None
    best: PointJson | None
    duration_s: float | None


class Comparison(TypedDict):
    """Runs by a metric, the best one first."""

    version: int
    #: ``val/accuracy``.
    metric: str
    #: ``min`` or ``max``.
    goal: str
    #: In which the runs differ.
    keys: list[str]
    runs: list[ComparedRun]


class SpreadJson(TypedDict):
    """Of a group of runs; ``std`` is null for one run."""

    mean: float
    std: float | None
    count: int


class GroupJson(TypedDict):
    """Runs that differ in the averaged keys only."""

    ids: list[str]
    values: dict[str, Any]
    last: SpreadJson | None
    best: SpreadJson | None
    duration_s: float | None


class GroupComparison(TypedDict):
    """Groups of runs, the best one first."""

    version: int
    metric: str
    goal: str
    keys: list[str]
    #: The keys of ``--over``.
    over: list[str]
    groups: list[GroupJson]


class ComparedIds(TypedDict):
    """One of two runs."""

    id: str
    path: str


class CodeDifferenceJson(TypedDict):
    """Files in which two code snapshots differ."""

    added: list[str]
    changed: list[str]
    removed: list[str]
    #: Lines of a unified diff; at the end what was omitted.
    diff: list[str]


class Difference(TypedDict):
    """In what the second of two runs differs from the first."""

    version: int
    runs: list[ComparedIds]
    #: Key → its two values.
    settings: dict[str, list[Any]]
    #: Package → its two versions.
    versions: dict[str, list[Any]]
    code: CodeDifferenceJson | None
    #: Why there is no ``code``.
    code_unknown: str | None


class SyncedJson(TypedDict):
    """What became of a run's rows at one destination."""

    id: str
    path: str
    #: ``wandb``, ``mlflow`` or ``tensorboard``.
    to: str
    #: The final rows, and the step of the last one.
    rows: int
    step: int | None
    #: Those that this command has sent.
    rows_sent: int
    #: The run's page, its id at the service, or the folder of the event files.
    target: str | None
    error: str | None
    #: Lines of ``metrics.jsonl`` that can't be sent, and why.
    notes: list[str]


class Synchronization(TypedDict):
    """Which rows were sent where."""

    version: int
    synced: list[SyncedJson]


class Evaluation(TypedDict):
    """One evaluation of a checkpoint."""

    version: int
    id: str
    path: str
    #: Like a ``val`` row of ``metrics.jsonl``.
    row: dict[str, Any]


class CheckpointJson(TypedDict):
    """One checkpoint, checked by its hashes."""

    step: int
    path: str
    #: Empty if it is intact.
    problems: list[str]
    #: False if the attempt that wrote it no longer owned the run.
    counts: bool
    #: Whether it is the one that would be loaded.
    loads: bool


class VerifiedRun(TypedDict):
    """A run's checkpoints, the newest one first."""

    id: str
    name: str
    path: str
    checkpoints: list[CheckpointJson]


class Verification(TypedDict):
    """Which checkpoints would load."""

    version: int
    runs: list[VerifiedRun]


#: Command with its options → the type of what it prints.
SHAPES: dict[str, Any] = {
    "status": Runs,
    "submit": Runs,
    "resume": Runs,
    "cancel": Runs,
    "plan": Plan,
    "validate": Validation,
    "doctor": Diagnosis,
    "compare": Comparison,
    "compare --over": GroupComparison,
    "compare --group-by": GroupComparison,
    "compare --diff": Difference,
    "sync": Synchronization,
    "evaluate": Evaluation,
    "verify": Verification,
    **RESULT_SHAPES,
}
