"""Answers ``plan``'s questions about a step of a run, in a child of the command.

Nothing is trained; a question takes seconds. The data are read if that is possible quickly; a login node may
not have them. Otherwise their properties are derived from the file, with assumptions that ``plan`` prints.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from hpc_train.errors import BadFileError, UserError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.training_sections import NormalizeConfig
from hpc_train.experiment.data_facts.by_name import data_facts, task_facts
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.run.tracebacks import users_frame
from hpc_train.training.batch_size_search import one_sample
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.types import Batch, DataInfo, TargetSpec, Tensors
from hpc_train.training.flops import count_flops
from hpc_train.training.memory_prediction import PredictedStep, Prediction
from hpc_train.training.models.building import build_model
from hpc_train.training.models.fine_tuning import prepare_for_training
from hpc_train.training.models.preprocessing import with_preprocessing
from hpc_train.training.tasks.base import make_task, target_spec

#: Time limit for opening the data and reading a sample (assumed).
_LIMIT_S = 10.0
#: Defaults if the file has no value: ImageNet's classes and usual size, GPT-2's vocabulary and window.
_CLASSES, _SIDE, _CHANNELS = 1000, 224, 3
#: Sizes to assume in turn if a model, such as one for CIFAR, does not accept ImageNet's.
_OTHER_SIDES = (32, 64, 28, 96)
_VOCABULARY, _TOKENS = 50257, 1024
#: Default for detectors: COCO's.
_OBJECT_CLASSES = 80
#: Number of samples in a prediction: more than any global batch.
_MANY = 2**40
#: Time limit of the search for the largest micro-batch; an estimate not verified by then is dropped. Assumed.
_SEARCH_S = 20.0


@dataclass(frozen=True)
class PlannedData:
    """The properties of the data that matter to a step."""

    info: DataInfo
    #: One sample, as a loader yields it.
    sample: Batch
    num_samples: int
    #: Description of the assumptions; None: no assumptions.
    assumption: str | None = None
    #: Why the data can't be read here, if nothing determines the size of the images.
    why_sizeless: str | None = None


def planned_data(experiment: Experiment) -> PlannedData:
    """Read one sample, or construct one if the data can't be read here within seconds."""
    try:
        with _limited(_LIMIT_S):
            source = build_source(experiment.data)
            sample = one_sample(source, experiment, Degrees(), 0, None)
        return PlannedData(source.info, sample, _MANY)
    except Exception as error:  # from the data's own code
        first_line = str(error).partition("\n")[0] or type(error).__name__
        return _assumed(
            experiment, first_line.partition("; ")[0] if isinstance(error, UserError) else first_line
        )


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


def _assumed(experiment: Experiment, why: str, usual_side: int = _SIDE) -> PlannedData:
    data, args = experiment.data, experiment.model.args
    facts = data_facts(data.name)
    is_text = "tokens" in (facts.modality, *task_facts(experiment.task).modalities)
    if is_text:
        length = _number(data.args.get("sequence_length"), _TOKENS)
        # The builder of hf/ uses the larger of the data's vocabulary and the model's own.
        usual = 1 if experiment.model.name.startswith("hf/") else _VOCABULARY
        classes = _number(args.get("num_classes", args.get("vocab_size")), usual)
        text = "the model's vocabulary" if classes == 1 else f"a vocabulary of {classes}"
        info = DataInfo(classes, 0, (), (), sequence_length=length)
        tokens = torch.zeros(1, length, dtype=torch.int64)
        sample = _batch(tokens, tokens.clone())
        return PlannedData(info, sample, _MANY, _because(f"sequences of {length} tokens, {text}", why))
    targets = task_facts(experiment.task).targets
    usual = 1 if targets == ("number",) else _OBJECT_CLASSES if "boxes" in targets else _CLASSES
    classes = _number(data.args.get("num_classes", args.get("num_classes")), usual)
    channels = facts.channels(data) or _CHANNELS
    known_side = facts.image_size(data) or _number(args.get("img_size"), 0)  # timm's name for it
    height, width = data.height_and_width or (known_side or usual_side,) * 2
    info = DataInfo(classes, channels, (0.5,) * channels, (0.5,) * channels)
    images = torch.zeros(1, channels, height, width, dtype=torch.uint8)
    sample = _batch(images, _target(experiment, info, height, width))
    text = _because(f"{classes} classes, images {channels}×{height}×{width}", why)
    return PlannedData(info, sample, _MANY, text, None if data.height_and_width or known_side else why)


def _because(text: str, why: str) -> str:
    return f"assumed {text}, because the data can't be read here ({why})"


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


@dataclass(frozen=True)
class RunQuestion:
    """A question of ``plan.prediction`` about one run."""

    experiment: Experiment
    degrees: Degrees
    is_on_gpu: bool
    #: Memory limit of a rank; None: unknown.
    limit_bytes: int | None
    #: Micro-batch sizes that the run may have, in ascending order.
    sizes: Sequence[int]
    #: Replaces the data of the experiment.
    assumed: PlannedData | None = None

    @classmethod
    def of(cls, question: dict[str, Any]) -> RunQuestion:
        """Read a question of ``plan.prediction``; pops ``experiment`` and ``degrees`` from it."""
        experiment = _normalized(Experiment.model_validate(question.pop("experiment")))
        return cls(experiment, Degrees(**question.pop("degrees")), **question)

    @cached_property
    def data(self) -> PlannedData:
        """The file's data, or assumed data if they can't be read here."""
        return self.assumed or planned_data(self.experiment)

    def answer(self) -> dict[str, Any]:
        """Return the answer; parts that can't be predicted are None, and ``problem`` is the reason.

        If the model does not accept the size that is assumed for images, others are tried.
        """
        first, why = self._answer(), self.data.why_sizeless
        if first["problem"] is None or why is None:
            return first
        others = (
            replace(self, assumed=_assumed(self.experiment, why, side))._answer() for side in _OTHER_SIDES
        )
        return next((other for other in others if other["problem"] is None), first)

    def _answer(self) -> dict[str, Any]:
        size = self.experiment.optimization.micro_batch_size
        problem, peak, largest = None, None, None
        try:
            first = size if size != "auto" else self.sizes[0]
            peak = self.predicted(first)
            largest = self._largest(first, peak)
            if size == "auto" and largest is not None:
                peak, size = self.predicted(largest), largest
        except Exception as error:  # from the code of the model or the task
            problem = _problem(error, self.data)
            peak = self._without_activations()
        return {
            "parts": None if peak is None else peak.parts,
            "communicated": {} if peak is None or problem else peak.communicated,
            "problem": problem,
            "assumption": self.data.assumption,
            "micro_batch_size": size if isinstance(size, int) else self.sizes[0],
            "largest": largest,
            "flops_per_sample": self._flops_per_sample(),
        }

    def predicted(self, size: int) -> Prediction:
        """Return the prediction for a micro-batch size, for the rank that needs the most memory."""
        stages = range(self.degrees.pipeline)
        ends = sorted({stages[0], stages[-1]})  # the first keeps most micro-batches, the last has the logits
        ranks_per_stage = self.degrees.world_size // self.degrees.pipeline
        steps = [self._step(size, rank=stage * ranks_per_stage) for stage in ends]
        return max((step.predict() for step in steps), key=lambda prediction: prediction.total)

    def _step(self, size: int, rank: int) -> PredictedStep:
        experiment = self.experiment.with_micro_batch_size(size)
        data = self.data
        return PredictedStep(
            experiment, data.info, data.sample, data.num_samples, self.degrees, rank, self.is_on_gpu
        )

    def _without_activations(self) -> Prediction | None:
        try:
            return self._step(self.sizes[0], rank=0).without_activations()
        except Exception:  # the same error as of the whole step, or a worse one
            return None

    def _largest(self, first: int, peak: Prediction) -> int | None:
        if self.limit_bytes is None:
            return None
        totals = {first: peak.total}
        until = time.monotonic() + _SEARCH_S

        def total(size: int) -> int | None:
            if size not in totals and time.monotonic() < until:
                try:
                    totals[size] = self.predicted(size).total
                except Exception:  # a model may refuse a size, such as BatchNorm a single sample
                    return None
            return totals.get(size)

        return largest_fitting(self.sizes, first, total, self.limit_bytes)

    def _flops_per_sample(self) -> float | None:
        """Return the FLOPs of forward and backward of one sample; None if they can't be counted."""
        data, count = self.data, 2  # some models refuse to normalize a batch of one
        try:
            with torch.device("meta"):
                model = build_model(self.experiment.model.model_copy(update={"pretrained": False}), data.info)
                prepare_for_training(model, self.experiment.model)
            step = self._step(self.sizes[0], rank=0)
            return count_flops(model, make_task(self.experiment, data.info), step.on_meta(count)) / count
        except Exception:  # an unknown operator, or code that needs data
            return None


def largest_fitting(
    sizes: Sequence[int], first: int, total: Callable[[int], int | None], limit: int
) -> int | None:
    """Return the largest of ``sizes`` whose ``total`` is known to be at most ``limit``, or None.

    Memory grows almost linearly with the size, so two totals lead to the neighbors of the limit in few calls.
    ``total`` returns None if there is no time left.
    """
    fits, too_large = 0, len(sizes)  # number known to fit; index of the smallest known not to
    tried: dict[int, int] = {}
    guess = sizes.index(first)
    while fits < too_large:
        nbytes = total(sizes[guess])
        if nbytes is None:
            break
        tried[sizes[guess]] = nbytes
        fits, too_large = (guess + 1, too_large) if nbytes <= limit else (fits, guess)
        guess = min(max(_by_line(sizes, tried, limit), fits), too_large - 1)
    return sizes[fits - 1] if fits else None


def _by_line(sizes: Sequence[int], tried: dict[int, int], limit: int) -> int:
    """Return the index of the largest size that fits by a line through the totals nearest to the limit."""
    nearest = sorted(tried, key=lambda size: abs(tried[size] - limit))[:2]
    if len(nearest) < 2:
        (size,) = nearest
        return sizes.index(size) + (1 if tried[size] <= limit else -1)
    low, high = sorted(nearest)
    slope = max((tried[high] - tried[low]) / (high - low), 1e-9)
    at_limit = low + (limit - tried[low]) / slope
    return sum(size <= at_limit for size in sizes) - 1


def _normalized(experiment: Experiment) -> Experiment:
    """Return the experiment with arbitrary mean and std if the weights' values are not available here."""
    try:
        return with_preprocessing(experiment)
    except BadFileError:  # a wrong model name is reported when the model is built
        normalize = NormalizeConfig(mean=[0.5] * 3, std=[0.5] * 3)
        return experiment.model_copy(
            update={"data": experiment.data.model_copy(update={"normalize": normalize})}
        )


def _problem(error: Exception, data: PlannedData) -> str:
    """Return why activations are unknown; for errors that ranks may have too, also how to try the step."""
    text = _in_a_line(error)
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        why = "the model's forward pass depends on the values of its inputs, as a detector's does"
        return f"activations are not predicted: {why} ({text})"
    where = users_frame(error)
    shown = text if where is None else f"{where}: {text}"
    if data.assumption:
        remedy = "plan where the data are" + (", or write data.image_size" if data.why_sizeless else "")
        return (
            f"activations are not predicted: the model does not accept the assumed data ({shown}); {remedy}"
        )
    if where is None:
        return f"activations are unknown: {shown}"
    remedy = "the ranks may fail alike: `hpc-train prepare` tries a step on samples"
    return f"activations are unknown: {shown}; {remedy}"


def _in_a_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a question of ``plan.prediction``, its ``problem`` for any error."""
    try:
        return RunQuestion.of(question).answer()
    except Exception as error:
        return {"parts": None, "problem": _in_a_line(error)}
