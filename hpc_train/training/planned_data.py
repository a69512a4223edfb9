"""The properties of the data that a prediction needs: ``DataInfo``, one sample's shapes, number of samples.

They are read from the data if that is possible quickly; a login node may not have them. Otherwise they are
derived from the file, with assumptions that ``plan`` prints.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from hpc_train.config.schema import Experiment
from hpc_train.data_facts.by_name import data_facts, task_facts
from hpc_train.datasets.building import build_source
from hpc_train.datasets.structures import Tensors
from hpc_train.datasets.types import Batch, DataInfo, TargetSpec
from hpc_train.tasks.base import make_task, target_spec
from hpc_train.topology.degrees import Degrees
from hpc_train.training.batch_size_trial import one_sample

#: Time limit for opening the data and reading a sample (assumed).
_LIMIT_S = 10.0
#: Defaults if the file has no value: ImageNet's classes and usual size, GPT-2's vocabulary and window.
_CLASSES, _SIDE, _CHANNELS = 1000, 224, 3
_VOCABULARY, _TOKENS = 50257, 1024
#: Default for detectors: COCO's.
_OBJECT_CLASSES = 80
#: Number of samples in a prediction: more than any global batch.
_MANY = 2**40


@dataclass(frozen=True)
class PlannedData:
    """The properties of the data that matter to a step."""

    info: DataInfo
    #: One sample, as a loader yields it.
    sample: Batch
    num_samples: int
    #: Description of the assumptions; None: no assumptions.
    assumption: str | None = None


def planned_data(experiment: Experiment) -> PlannedData:
    """Read one sample, or construct one if the data can't be read here within seconds."""
    try:
        with _limited(_LIMIT_S):
            source = build_source(experiment.data)
            sample = one_sample(source, experiment, Degrees(), 0, None)
        return PlannedData(source.info, sample, _MANY)
    except Exception as error:  # from the data's own code
        first_line = str(error).partition("\n")[0] or type(error).__name__
        return _assumed(experiment, first_line)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread after this time."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"reading a sample takes more than {seconds:g} s")

    before: Any = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _assumed(experiment: Experiment, why: str) -> PlannedData:
    data, args = experiment.data, experiment.model.args
    facts = data_facts(data.name)
    is_text = "tokens" in (facts.modality, *task_facts(experiment.task).modalities)
    if is_text:
        length = _number(data.args.get("sequence_length"), _TOKENS)
        # The builder of hf/ uses the larger of the data's vocabulary and the model's own.
        usual = 1 if experiment.model.name.startswith("hf/") else _VOCABULARY
        classes = _number(args.get("num_classes", args.get("vocab_size")), usual)
        words = "the model's vocabulary" if classes == 1 else f"{classes}"
        info = DataInfo(classes, 0, (), (), sequence_length=length)
        tokens = torch.zeros(1, length, dtype=torch.int64)
        sample = _batch(tokens, tokens.clone())
        return PlannedData(info, sample, _MANY, f"{why}; assumed {length} tokens of {words}")
    targets = task_facts(experiment.task).targets
    usual = 1 if targets == ("number",) else _OBJECT_CLASSES if "boxes" in targets else _CLASSES
    classes = _number(data.args.get("num_classes", args.get("num_classes")), usual)
    channels = facts.channels(data) or _CHANNELS
    side = facts.image_size(data) or _number(args.get("img_size"), _SIDE)  # timm's name for it
    height, width = data.height_and_width or (side, side)
    info = DataInfo(classes, channels, (0.5,) * channels, (0.5,) * channels)
    images = torch.zeros(1, channels, height, width, dtype=torch.uint8)
    sample = _batch(images, _target(experiment, info, height, width))
    words = f"assumed {classes} classes, images {channels}×{height}×{width}"
    return PlannedData(info, sample, _MANY, f"{why}; {words}")


def _target(experiment: Experiment, info: DataInfo, height: int, width: int) -> Tensors:
    spec = target_spec(make_task(experiment, info))
    if isinstance(spec, dict):
        return {name: _target_of(part, height, width) for name, part in spec.items()}
    return _target_of(spec or TargetSpec("a number"), height, width)


def _target_of(spec: TargetSpec, height: int, width: int) -> Tensors:
    if spec.geometry == "mask":
        return torch.zeros(1, height, width, dtype=torch.uint8)
    dtype = torch.float32 if spec.kind == "float" else torch.int64
    if spec.is_ragged:
        return [torch.zeros([size or 1 for size in spec.shape or ()], dtype=dtype)]
    return torch.zeros(1, *(size or 1 for size in spec.shape or ()), dtype=dtype)


def _batch(inputs: Tensor, targets: Tensors) -> Batch:
    return Batch(0, 0, 1.0, inputs, targets, torch.ones(1, dtype=torch.bool))


def _number(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default
