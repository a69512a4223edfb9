"""The experiment file of ``init``: sizes, epochs, augmentation and learning rate for the data and the device.

Comments are the reason for a value, otherwise the schema's description of the key.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.console import one_line
from hpc_train.errors import UsageError, counted
from hpc_train.experiment.config.keys import JOB, description_of
from hpc_train.experiment.config.marked_yaml import read_value
from hpc_train.experiment.config.problems import KeyPath, is_clean, shown
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.by_name import data_facts
from hpc_train.experiment.data_facts.survey.content import Images, Survey
from hpc_train.experiment.data_facts.task_starts import IMAGE_SIZE, STARTS, Cost, Recipe, Start
from hpc_train.experiment.validate import model_facts
from hpc_train.launchers.base import JobSection
from hpc_train.registry import suggestion

#: Marks values that only the user knows.
CHANGE = "CHANGE"
DOCS = "https://github.com/hpc-train/hpc-train/blob/main/docs"
_COLUMN = 44
#: Shorter descriptions repeat the key, longer ones obscure the file.
_COMMENT_LENGTHS = (20, 90)
_PLAIN = re.compile(r"[A-Za-z0-9_./~][A-Za-z0-9_./:~+-]*")
_MIN_STEPS_PER_EPOCH = 20
_MIN_BATCH = 2
#: Without GPUs: core seconds of the whole training; on two cores a bit more than half as many seconds.
_CPU_BUDGET_S = 80.0
#: Core seconds per step and evaluation besides those of the samples: optimizer, metrics. Measured.
_STEP_S = 0.012
#: Maximum number of samples → epochs from random weights: with GPUs as in ResNet's recipes.
_GPU_EPOCHS = ((20_000, 100), (200_000, 60), (math.inf, 90))
_CPU_EPOCHS = ((50, 100), (200, 40), (2_000, 30), (math.inf, 20))
_MIN_EPOCHS = 3
_TEXT_EPOCHS = 10
_MIN_EVALUATIONS, _MOST_EVALUATIONS = 4, 10
#: Sides to which larger images are reduced.
_SIDES = (512, 384, 320, 256, 224, 192, 160, 128, 96, 64, 48)
#: Images up to this side, like those of CIFAR and MNIST, are shifted instead of cropped and resized.
_SMALL_SIDE = 64
#: A loader process decodes while the rank computes if reading a sample takes longer.
_SLOW_READ_S = 2e-3
#: The cost of a model of the user's on a CPU: that of timm/resnet18. Measured.
_OTHER_COST = Cost(2e-3, 2.6e-6)


@dataclass(frozen=True, kw_only=True)
class FirstFile:
    """The choices and facts from which the file follows."""

    name: str
    start: Start
    data: str | None = None
    root: str | None = None
    model: str | None = None
    #: The cluster's section; None: a file for this machine.
    job: JobSection | None = None
    #: The device of this machine.
    gpus: int = 0
    #: The content of the root; None: unknown.
    survey: Survey | None = None

    @property
    def ranks(self) -> int:
        """The ranks of a run of the file; on this machine one per GPU, at least 1."""
        return max(1, self.gpus) if self.job is None else self.job.ranks

    @property
    def has_gpus(self) -> bool:
        """Whether the ranks have GPUs: then the file gets bf16 and ``workers: auto``."""
        return self.gpus > 0 if self.job is None else self.job.has_gpus


@dataclass(frozen=True)
class _Content:
    """Sections of the file, and the comments of some of its lines."""

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    optimization: Mapping[str, Any]
    evaluation: Mapping[str, Any] | None
    best: tuple[str, str] | None
    comments: Mapping[KeyPath, str]


def start_of(task: str) -> Start:
    """Return the defaults of a task. Raises UsageError for another one."""
    starts = {start.task: start for start in STARTS}
    if task not in starts:
        remedy = suggestion(task, list(starts), f"write one of {', '.join(starts)}, and change the file")
        raise UsageError(f"--task: init has no file for {shown(task)}; {remedy}")
    return starts[task]


def first_file(chosen: FirstFile, output: Path) -> str:
    """Return the text of the file."""
    content = _default(chosen) if chosen.survey is None else _Fitted(chosen, chosen.survey, output).content
    sections = {
        "name": chosen.name,
        "seed": 0,
        "task": chosen.start.task,
        "model": content.model,
        "data": content.data,
        "optimization": content.optimization,
    }
    if chosen.has_gpus:
        sections["precision"] = "bf16"
    if content.evaluation is not None:
        sections["evaluation"] = content.evaluation
    best = {} if content.best is None else {"best": dict(zip(("metric", "mode"), content.best, strict=True))}
    sections["checkpoint"] = {"every_min": 10, **best}
    body = list(_rendered(sections, content.comments))
    lines = [*_header(output, chosen, has_changes=any(f"# {CHANGE}:" in line for line in body)), *body]
    text = "\n".join(lines) + "\n"
    return text if chosen.job is None else with_job_section(text, chosen.job)


def _default(chosen: FirstFile) -> _Content:
    """Return the content for data that are not known."""
    start = chosen.start
    data = chosen.data or start.data_for(chosen.root)
    name = chosen.model or start.model_for(data)
    model: dict[str, Any] = {"name": name}
    if name == start.model and start.model_args:
        model["args"] = dict(start.model_args)
    batch, micro = _sizes(start, _num_samples(start, data, chosen), chosen.ranks)
    optimization = {
        "epochs": 10, "global_batch_size": batch, "micro_batch_size": micro, **start.optimization,
        "schedule": {"name": "cosine", "warmup_epochs": 0.5},
    }  # fmt: skip
    section, comments = _data(start, data, chosen)
    return _Content(model, section, optimization, {"every_epochs": 1}, start.metric, comments)


def list_path(output: Path, split: str) -> Path:
    """Return the path of a list of images that ``init`` writes beside the file."""
    return output.with_name(f"{output.stem}-{split}.csv")


class _Fitted:
    """The content for data that were looked at."""

    def __init__(self, chosen: FirstFile, survey: Survey, output: Path) -> None:
        self._chosen, self._survey, self._start = chosen, survey, chosen.start
        self._lists = {split: str(list_path(output, split).absolute()) for split in survey.new_lists}
        self._recipe: Recipe = self._start.gpu if chosen.has_gpus else self._start.cpu
        self._comments: dict[KeyPath, str] = {}
        #: The user's model, unless it is the recipe's.
        self._other_model = chosen.model if chosen.model != self._recipe.model else None
        self._batch, self._micro = self._batch_sizes()
        self._epochs, self._size = self._epochs_and_size()

    @property
    def content(self) -> _Content:
        """Return all sections."""
        survey = self._survey
        has_classes = survey.args.get("target", "class") == "class"
        best = self._start.metric if has_classes or self._start.task != "classification" else _MULTI_LABEL
        return _Content(
            self._model(), self._data(), self._optimization(has_classes), self._evaluation(),
            best if survey.has_val else None, self._comments,
        )  # fmt: skip

    def _model(self) -> dict[str, Any]:
        recipe = self._recipe
        if self._other_model is not None:
            return {"name": self._other_model}
        model: dict[str, Any] = {"name": recipe.model}
        if recipe.cost is not None and self._survey.images is not None:
            self._comments["model", "name"] = "small, for a CPU"
        if recipe.model_args:
            model["args"] = dict(recipe.model_args)
        if recipe.cost is None and recipe.model == _RESNET and self._size and self._size[0] <= _SMALL_SIDE:
            model["args"] = {"output_stride": 8}
            self._comments["model", "args"] = "its last layers keep 4 x 4 pixels of a 32 x 32 image, not one"
        return model

    def _batch_sizes(self) -> tuple[int, int]:
        """Return global and micro-batch size, powers of two, with at least 20 steps per epoch if possible."""
        samples, ranks = self._survey.samples, self._chosen.ranks
        batch = self._recipe.batch
        while samples is not None and batch > _MIN_BATCH and samples // batch < _MIN_STEPS_PER_EPOCH:
            batch //= 2
        micro = self._recipe.micro
        while micro > 2 and micro * ranks > batch:
            micro //= 2
        if samples is not None and micro * ranks > batch:
            micro = 2 if 2 * ranks <= samples else 1
            batch = micro * ranks
        if samples is not None:
            steps = max(1, samples // batch)
            self._comments["optimization", "global_batch_size"] = f"{counted(steps, 'step')} per epoch"
        return batch, micro

    def _epochs_and_size(self) -> tuple[int, tuple[int, int] | None]:
        """Return the epochs, and height and width of images. A CPU has a budget of core seconds."""
        images, samples = self._survey.images, self._survey.samples or 0
        sizes = [None] if images is None else self._image_sizes(images)
        cost = self._recipe.cost
        table = _GPU_EPOCHS if cost is None else _CPU_EPOCHS
        most = _TEXT_EPOCHS if images is None else next(epochs for limit, epochs in table if samples <= limit)
        if cost is None or not samples:
            return most, sizes[0]
        cost = cost if self._other_model is None else _OTHER_COST
        budget_s = _CPU_BUDGET_S / samples

        def sample_s(size: tuple[int, int] | None) -> float:
            units = self._survey.args.get("sequence_length", 1) if size is None else math.prod(size)
            return cost.of(units) + _STEP_S / self._batch + (images.read_s if images is not None else 0)

        least = 1 if images is None else _MIN_EPOCHS
        epochs = min(most, max(least, int(budget_s / sample_s(sizes[-1]))))
        size = next((size for size in sizes if epochs * sample_s(size) <= budget_s), sizes[-1])
        minutes = round(epochs * samples * sample_s(size) / 60)
        about = f"about {counted(minutes, 'minute')}" if minutes else "less than a minute"
        more = "; train longer for better results" if epochs < most else ""
        self._comments["optimization", "epochs"] = f"{about} on two cores{more}"
        return epochs, size

    def _image_sizes(self, images: Images) -> Sequence[tuple[int, int]]:
        """Return the sizes to choose from, the largest first.

        Never larger than the images, unless the user's model takes no other size.
        """
        is_square = self._start.task in ("classification", "regression")
        height, width = images.height, images.width
        short = min(height, width)
        if is_square:
            height = width = short
        sides = [side for side in _SIDES if side <= min(short, self._recipe.side)]
        sides = [side for side in sides if side >= self._recipe.min_side] or sides
        if is_square and (side := self._only_side(sides[0] if short > _SMALL_SIDE else short)):
            return [(side, side)]
        if short <= _SMALL_SIDE:
            return [(height, width) if is_square or images.is_one_size else _multiples(height, width, 8)]
        if is_square:
            return [(side, side) for side in sides]
        return [_multiples(side * height / short, side * width / short, 16) for side in sides]

    def _only_side(self, side: int) -> int | None:
        """Return the side of images that the user's model takes if it does not take ``side``."""
        if self._other_model is None:
            return None
        fitting = model_facts.facts(self._other_model, {}, image_size=side).get("fitting_size")
        return fitting if isinstance(fitting, int) and fitting != side else None

    def _optimization(self, has_classes: bool) -> dict[str, Any]:
        optimization = dict(self._recipe.optimization)
        optimizer = dict(optimization["optimizer"])
        factor = self._batch / self._recipe.batch
        is_sgd = optimizer["name"] == "sgd"
        if factor != 1:
            # Measured with AdamW, 60 images in batches of 2: accuracy 0.94 by a half, 0.60 by an eighth.
            optimizer["lr"] = _rounded(optimizer["lr"] * (factor if is_sgd else max(0.5, math.sqrt(factor))))
            rule = "in proportion to the batch" if is_sgd else "by its square root, at least a half"
            lr, batch = self._recipe.optimization["optimizer"]["lr"], self._recipe.batch
            self._comments["optimization", "optimizer"] = f"lr: {lr} for a batch of {batch}, {rule}"
        if not has_classes:
            optimization.pop("label_smoothing", None)
        sizes = {"epochs": self._epochs, "global_batch_size": self._batch, "micro_batch_size": self._micro}
        warmup = {"name": "cosine", "warmup_epochs": _rounded(min(5, self._epochs / 10))}
        return {**sizes, **optimization, "optimizer": optimizer, "schedule": warmup}

    def _data(self) -> dict[str, Any]:
        survey, chosen = self._survey, self._chosen
        data: dict[str, Any] = {"name": survey.name, "root": str(survey.root or chosen.root)}
        if survey.args:
            data["args"] = dict(survey.args) | self._lists
            if survey.args_reason:
                self._comments["data", "args"] = survey.args_reason
        images = survey.images
        if images is not None and self._size is not None:
            data["image_size"] = self._image_size(images, self._size)
            data["augment"] = self._augment(images, self._size)
            if images.unreadable:
                data["on_bad_sample"] = "skip"
        if chosen.has_gpus or (images is not None and images.read_s > _SLOW_READ_S):
            data["workers"] = "auto"
        return data

    def _image_size(self, images: Images, size: tuple[int, int]) -> int | list[int]:
        """Return ``data.image_size``, with the reason as its comment."""
        height, width = size
        key, short = ("data", "image_size"), min(images.height, images.width)
        smaller = f"reduced from {images.width} x {images.height}"
        if min(size) > short:
            self._comments[key] = f"{self._chosen.model} takes only images of this size; yours have {short}"
        elif min(size) == short and images.is_one_size:
            self._comments[key] = "their own size"
        elif self._recipe.cost is not None and min(size) < min(short, self._recipe.side):
            self._comments[key] = f"{smaller}, for a CPU; larger is better and slower"
        else:
            self._comments[key] = smaller if min(size) < short else "their usual size"
        return height if height == width else [height, width]

    def _augment(self, images: Images, size: tuple[int, int]) -> dict[str, Any]:
        if self._start.task == "segmentation":
            return {"random_scale": [0.5, 2.0], "hflip": 0.5}
        if self._start.task == "detection":
            return {"hflip": 0.5}
        if self._start.task == "regression":
            self._comments["data", "augment"] = "no crops and flips: the number may depend on the place"
            return {"color_jitter": {"brightness": 0.2, "contrast": 0.2}}
        if min(images.height, images.width) > _SMALL_SIDE:
            return {"random_resized_crop": {"scale": [0.35, 1.0]}, "hflip": 0.5}
        shift = {"crop_padding": max(1, size[0] // 8)}
        if images.channels == 1:
            self._comments["data", "augment"] = "no flips: small gray images are often characters"
            return shift
        return {**shift, "hflip": 0.5}

    def _evaluation(self) -> dict[str, Any] | None:
        if not self._survey.has_val:
            return None
        steps = (self._survey.samples or 0) // self._batch * self._epochs
        if self._epochs < _MIN_EPOCHS and steps > _MIN_EVALUATIONS:
            return {"every_steps": math.ceil(steps / _MIN_EVALUATIONS)}
        return {"every_epochs": math.ceil(self._epochs / _MOST_EVALUATIONS)}


_RESNET = "timm/resnet18"
_MULTI_LABEL = ("map_multilabel", "max")


def _multiples(height: float, width: float, of: int) -> tuple[int, int]:
    return max(1, round(height / of)) * of, max(1, round(width / of)) * of


def _rounded(number: float) -> float:
    """Return a number with two significant digits."""
    return float(f"{number:.2g}")


def with_job_section(text: str, job: JobSection) -> str:
    """Return the text with the cluster's section at its end, unless it has one."""
    if re.search(rf"^{JOB}:", text, flags=re.MULTILINE):
        return text
    notes = [f"# {one_line(note)}" for note in job.notes]
    heading = ["", "# This cluster has:", *notes] if notes else [""]
    return text + "\n".join([*heading, *_rendered({JOB: job.values}, {})]) + "\n"


def quoted(value: object) -> str:
    """Return a value as YAML on one line. Raises UsageError for text with control characters."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {quoted(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(quoted, value)) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    if not is_clean(value):
        raise UsageError(f"{shown(value)}: has a control character or line break; write it without")
    # YAML would read it as a number, or as true.
    is_plain = _PLAIN.fullmatch(value) and not value.endswith(":") and read_value(value)[0] == value
    return value if is_plain else json.dumps(value, ensure_ascii=False)


def _data(start: Start, name: str, chosen: FirstFile) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Return the section, and the remarks on values that only the user knows."""
    data: dict[str, Any] = {"name": name}
    changes: dict[KeyPath, str] = {}
    facts = data_facts(name)
    size = facts.image_size(DataConfig(name=name))
    if start.needs_root(name) or chosen.root is not None:
        data["root"] = chosen.root or start.root
    if chosen.root is None and start.needs_root(name):
        changes["data", "root"] = f"{CHANGE}: {facts.root}"
    if name == start.own_data:
        data |= start.own_keys
        table = f"{DOCS}/reference_parts.md#data-dataname"
        changes |= {("data", key): f"{CHANGE}: as in your data ({table})" for key in start.to_change}
    elif facts.modality == "images" and facts.image_size_argument is None and size is None:
        data["image_size"] = IMAGE_SIZE
    if chosen.has_gpus:
        data["workers"] = "auto"
    return data, changes


def _num_samples(start: Start, name: str, chosen: FirstFile) -> int | None:
    """Return N if it can be counted without the data set's own code."""
    args = start.own_keys.get("args", {}) if name == start.own_data else {}
    try:
        return data_facts(name).num_samples(DataConfig(name=name, root=chosen.root, args=args))
    except Exception:  # `validate` explains data that can't be read
        return None


def _sizes(start: Start, samples: int | None, ranks: int) -> tuple[int, int]:
    """Return global and micro-batch size: one micro-batch per rank, and a step no larger than the data."""
    batch, micro = start.global_batch_size, start.micro_batch_size
    while True:
        size = max(batch, micro * ranks)
        if samples is None or size <= samples or micro == 1:
            return size, micro
        micro //= 2
        batch = min(batch, samples // micro * micro)


def _header(output: Path, chosen: FirstFile, *, has_changes: bool) -> list[str]:
    shown_name, where = one_line(str(output)), "" if chosen.job is not None else " --local"
    remarks = [] if chosen.survey is None else chosen.survey.lines
    device = f"{'GPUs' if chosen.has_gpus else 'CPUs'} of {'a cluster' if chosen.job else 'this machine'}"
    return [
        f"# An experiment, written by `hpc-train init` for the {device}.",
        *(["# The data, by a sample of their files:"] if remarks else []),
        *(f"#   {one_line(remark)}" for remark in remarks),
        *([f"# Lines with {CHANGE} have values that only you know; the others are a start."] * has_changes),
        f"# All keys: {DOCS}/reference_file.md",
        "#",
        *(f"#   hpc-train {verb} {shown_name}" for verb in ("validate", "prepare")),
        *(f"#   hpc-train {verb} {shown_name}{where}" for verb in ("plan", "submit")),
    ]


def _rendered(content: Mapping[str, Any], changes: Mapping[KeyPath, str]) -> Iterator[str]:
    """Yield the lines of a mapping of sections: two levels as blocks, deeper ones on one line."""
    for key, value in content.items():
        if not isinstance(value, Mapping):
            yield _line((key,), f"{key}: {quoted(value)}", changes)
            continue
        yield _line((key,), f"{key}:", changes)
        for below, item in value.items():
            yield _line((key, below), f"  {below}: {quoted(item)}", changes)


def _line(path: KeyPath, text: str, changes: Mapping[KeyPath, str]) -> str:
    return commented(text, changes.get(path) or _described(path))


def commented(text: str, comment: str) -> str:
    """Return a line of the file, with a comment if there is one."""
    return f"{text:<{_COLUMN}} # {comment}" if comment else text


def _described(path: KeyPath) -> str:
    """Return the first sentence of the key's description; empty if that is too short or too long."""
    sentence = re.split(r"(?<=\.)\s|\s*Default:", " ".join(description_of(path).split()))[0]
    sentence = sentence.replace("``", "").rstrip(".")
    return sentence if _COMMENT_LENGTHS[0] <= len(sentence) <= _COMMENT_LENGTHS[1] else ""
