"""The facts of a data set, provider of models or task by its name, and the rules that follow from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeVar, get_args

from hpc_train.errors import shortened
from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.built_in import DATA_SETS, MODELS, TASKS
from hpc_train.experiment.data_facts.facts import DataFacts, ModelFacts, Target, TaskFacts
from hpc_train.experiment.data_facts.listed_data import has_index, without_index
from hpc_train.paths import expanded
from hpc_train.registry import described, is_factory, load_traits, split_name

_Row = TypeVar("_Row", DataFacts, TaskFacts)


def data_facts(name: str) -> DataFacts:
    """Return the facts of the data set called ``name``; the defaults for one without a row.

    Raises BadFileError if a plug-in's row can't be imported or is not a ``DataFacts``.
    """
    if is_factory(name):
        return DataFacts()
    provider = split_name(name)[0]
    return DATA_SETS.get(provider) or load_traits("datasets", provider, DataFacts())


def provider_facts(model: str) -> ModelFacts:
    """Return the facts of the provider of the model called ``model``; the defaults for one without a row."""
    return ModelFacts() if is_factory(model) else MODELS.get(split_name(model)[0], ModelFacts())


def task_facts(name: str) -> TaskFacts:
    """Return the requirements of the task called ``name``. Raises BadFileError like ``data_facts``."""
    if is_factory(name):
        return TaskFacts()
    return TASKS.get(name) or load_traits("tasks", name, TaskFacts())


def _rows(kind: str, built_in: Mapping[str, _Row], default: _Row) -> dict[str, _Row]:
    """Return the rows of all parts of a kind, the built-in ones first; none of a broken plug-in."""
    rows = dict(built_in)
    for name in described(kind):
        with suppress(Exception):
            rows[name] = load_traits(kind, name, default)
    return rows


def target_of(data: DataConfig) -> Target | None:
    """Return the kind of a sample's target; None if only the data set's code determines it."""
    facts = data_facts(data.name)
    if facts.default_target is None:
        return facts.target
    value = data.args.get("target", facts.default_target)
    return next((target for target in get_args(Target) if target == value), None)


def has_one_shape(experiment: Experiment) -> bool:
    """Return True if a model certainly receives the same shapes in all batches, also within its layers.

    A detector resizes images itself and has a varying number of proposals.
    """
    data, task = data_facts(experiment.data.name), task_facts(experiment.task)
    target = target_of(experiment.data)
    may_be_ragged = task.needs_whole_model or target == "boxes" or not (task.targets or target)
    is_resized = experiment.data.image_size is not None or data.image_size(experiment.data) is not None
    # Images of different sizes can't be in one batch.
    is_stacked = data.modality is not None and experiment.optimization.micro_batch_size != 1
    return not may_be_ragged and (is_resized or is_stacked or data.modality in ("tokens", "features"))


def training_samples(data: DataConfig) -> int | None:
    """Return N; None if only the data set's code determines it."""
    return data_facts(data.name).num_samples(data)


def missing_root(data: DataConfig) -> Problem | None:
    """Return the problem if the data set needs ``data.root`` and the file has none."""
    facts, name = data_facts(data.name), data.name
    is_no_name = facts.example == "" and "/" in name
    if not facts.needs_root or name in facts.rootless or data.root is not None or is_no_name:
        return None
    return Problem(("data", "root"), f"is missing, and {shortened(name)} needs it", f"write {facts.root}")


def misplaced(data: DataConfig) -> Problem | None:
    """Return the problem if the root lacks folders or files of its data set."""
    return None if data.root is None else data_facts(data.name).layout(expanded(data.root))


def missing_index(data: DataConfig) -> Problem | None:
    """Return the problem if ranks need an index of the data's files and there is none here."""
    facts = data_facts(data.name)
    files = facts.listing(data) if facts.index == "required" and facts.listing is not None else []
    try:
        is_missing = bool(files) and not has_index(data, files)
    except OSError:  # the ranks may be able to read them
        return None
    if not is_missing:
        return None
    return Problem(("data", "root"), *without_index(data, files), code="data.index-missing")


def task_misfit(task: str, data_name: str, data: DataFacts) -> tuple[str, str] | None:
    """Return the reason why ``task`` can't use the data, and a remedy; None if they fit."""
    needs = task_facts(task)
    if needs.fits(data):
        return None
    target = () if data.target is None else (data.target,)
    modality = () if data.modality is None else (data.modality,)
    all_tasks = _rows("tasks", TASKS, TaskFacts())
    all_data = _rows("datasets", DATA_SETS, DataFacts())
    tasks = [name for name, facts in all_tasks.items() if facts.fits(data)]
    fitting = {name: facts for name, facts in all_data.items() if needs.fits(facts)}
    others = [name for name, facts in fitting.items() if facts.example == "" and facts.target is not None]
    remedies = [*tasks, f"data.name: {' or '.join(others)}"] if others else tasks
    wanted, actual = _content_text(needs.modalities, needs.targets), _content_text(modality, target)
    message = f"{task} reads {wanted}, and {data_name} has {actual}"
    return message, f"write {', or '.join(remedies) or 'another data set'}"


def _content_text(modalities: Sequence[str], targets: Sequence[str]) -> str:
    return (" or ".join(modalities) or "samples") + (f" (target: {' or '.join(targets)})" if targets else "")


#: Batches that each loader process reads ahead.
PREFETCHED_BATCHES = 2


def image_shape(data: DataConfig) -> tuple[int, int] | None:
    """Return height and width of the images in pixels; None if unknown, if they vary, or without images."""
    facts = data_facts(data.name)
    side = data.args.get(facts.image_size_argument or "", facts.image_size(data))
    height, width = data.height_and_width or (side, side)
    if facts.modality == "images" and isinstance(height, int) and isinstance(width, int):
        return height, width
    return None


def prefetched_bytes(experiment: Experiment, ranks: int = 1) -> int | None:
    """Return the bytes of the images that the training loaders of ``ranks`` ranks read ahead.

    None if the file does not determine it: a key is ``auto``, or the images' size is unknown or varies.
    """
    data, shape = experiment.data, image_shape(experiment.data)
    numbers = [
        data_facts(data.name).channels(data), experiment.optimization.micro_batch_size, data.workers
    ]  # fmt: skip
    if shape is None or not all(type(number) is int for number in numbers):
        return None
    return math.prod([*shape, *(int(number or 0) for number in numbers)]) * ranks * PREFETCHED_BATCHES
