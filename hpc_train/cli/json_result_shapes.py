"""What commands print with ``--json`` that write or remove files, or read logs; see ``json_shapes``."""

from __future__ import annotations

from typing import Any, TypedDict


class RemovedJson(TypedDict):
    """A file or folder that was removed."""

    path: str
    bytes: int
    why: str


class CleanedRun(TypedDict):
    """What a run no longer needed, and what it keeps."""

    id: str
    name: str
    path: str
    removed: list[RemovedJson]
    #: Folders of checkpoints that are still there.
    checkpoints: list[str]


class Cleaning(TypedDict):
    """What was removed; nothing if the answer was no."""

    version: int
    runs: list[CleanedRun]
    #: Snapshots of code that no run used.
    code: list[RemovedJson]
    #: Of all that was removed.
    bytes: int


class RemovedRun(TypedDict):
    """A run that was removed, as it was."""

    id: str
    name: str
    path: str
    state: str
    step: int
    bytes: int


class Removal(TypedDict):
    """The runs that were removed; none if the answer was no."""

    version: int
    runs: list[RemovedRun]
    code: list[RemovedJson]
    bytes: int


class Export(TypedDict):
    """The file that was written."""

    version: int
    #: The run's.
    id: str
    file: str
    bytes: int
    #: Of the checkpoint.
    step: int
    ema: bool
    #: Weights and buffers.
    tensors: int


class Predictions(TypedDict):
    """The file that was written."""

    version: int
    #: The run's.
    id: str
    file: str
    #: ``jsonl`` or ``csv``.
    format: str
    bytes: int
    step: int
    #: One per sample.
    predictions: int
    #: Samples without a prediction, since they can't be read (``data.on_bad_sample: skip``).
    skipped: int


class LogFile(TypedDict):
    """One log of an attempt."""

    attempt: int
    rank: int
    file: str
    bytes: int


class Log(TypedDict):
    """The lines that are printed without ``--json``, and where all logs of the run are."""

    version: int
    #: The run's.
    id: str
    name: str
    path: str
    #: The log that was read: of a rank, or what the batch script printed before any rank started.
    file: str
    #: Null for a batch script.
    attempt: int | None
    rank: int | None
    #: Without line breaks.
    lines: list[str]
    logs: list[LogFile]


class ReportedRun(TypedDict):
    """A run on the page."""

    id: str
    name: str
    path: str


class Page(TypedDict):
    """The page that was written."""

    version: int
    file: str
    bytes: int
    #: By which the runs are compared: ``val/accuracy``; null if nothing was measured yet.
    metric: str | None
    #: The best one first.
    runs: list[ReportedRun]


class FirstFileJson(TypedDict):
    """The experiment file that was written."""

    version: int
    file: str
    #: All files that were written: of a recipe its modules, too.
    files: list[str]
    #: Whether it is for this cluster rather than for this machine.
    for_cluster: bool
    #: Numbers of the lines that have to be changed.
    lines_to_change: list[int]


class RecipeJson(TypedDict):
    """An experiment file to start from."""

    name: str
    title: str


class Recipes(TypedDict):
    """What ``--from`` takes."""

    version: int
    recipes: list[RecipeJson]


class PreparedData(TypedDict):
    """Data that is complete here."""

    name: str
    root: str | None
    train_samples: int
    val_samples: int
    classes: int
    #: Samples, of those that were tried, that another one will replace.
    bad_samples: list[str]
    #: Files that are not read, and conversions that lose information.
    notices: list[str]


class PreparedModel(TypedDict):
    """A model whose weights are here, tried on samples of the data of that name."""

    name: str
    task: str
    data: str
    #: Null if the model was not built.
    parameters: int | None
    trained_parameters: int | None
    weights: str | None
    #: Why it was not built, or not run on samples; null if it was.
    unchecked: str | None


class Preparation(TypedDict):
    """What the runs of a file need, each once."""

    version: int
    data: list[PreparedData]
    models: list[PreparedModel]


#: As in ``json_shapes``.
RESULT_SHAPES: dict[str, Any] = {
    "clean": Cleaning,
    "rm": Removal,
    "export": Export,
    "predict": Predictions,
    "logs": Log,
    "report": Page,
    "init": FirstFileJson,
    "init --from list": Recipes,
    "prepare": Preparation,
}
