# ruff: noqa: N803, N806  (shape suffixes)
"""The files that an evaluation writes to the run folder besides its ``val`` row.

Each kind of file is an ``EvaluationOutput``. A step's files are complete once its row is in
``metrics.jsonl``, and are withdrawn together with the row.

Pictures (``evaluation.images``): the samples are the same in every evaluation and on any number of ranks: the
first, and others evenly spaced over the validation data. The rank that has a sample's outputs calls the task
to draw it, and rank 0 receives the few finished pictures; no other image leaves a rank.

Text of a language model: it continues the beginning of the validation data. Every rank computes the same
tokens with the same number of forward passes, since under FSDP and tensor parallelism a forward is
collective. Draws are a function of (seed, step, place), and no generator is read or seeded, so training does
not depend on them. Not available under strategies with stages, since no rank has the whole model.

Legend: K chosen samples, C channels, H rows, W columns; T tokens of a sequence, V size of the vocabulary.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor
from typing_extensions import override

from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.topology.strategy_traits import traits_of
from hpc_train.paths import RunPaths
from hpc_train.run.files import remove_folder, replacing
from hpc_train.run.storage_errors import named_errors, retried
from hpc_train.training.datasets.base import ArraySplit, DataSource
from hpc_train.training.datasets.normalize import mean_and_std
from hpc_train.training.datasets.random_numbers import Keys
from hpc_train.training.datasets.tokenization import decoder_of
from hpc_train.training.datasets.types import Batch, DataInfo, Tensors, is_structured, tensors_of
from hpc_train.training.tasks import drawing
from hpc_train.training.tasks.base import DrawsPictures, Task
from hpc_train.training.tasks.causal_lm import CausalLM

_log = logging.getLogger(__name__)

_PICTURES_FILE = "predictions.png"
#: How far float images may exceed black and white after their normalization is undone (assumed).
_TOLERANCE = 0.05
_TEXT_FILE = "sample.txt"
#: The next token is drawn from the most probable ones.
_TOP_K = 40
#: Tokens of the validation data that the model continues, at most half a sequence.
_PROMPT_TOKENS = 16
_BETWEEN = "\n--- continued by the model: ---\n"


#: Prefix of the metrics' names → sums of an evaluation.
Sums = dict[str, dict[str, Any]]


class EvaluationOutput:
    """One kind of file of an evaluation. Its calls are in the order of these methods."""

    def begin(self, prefix: str) -> None:
        """An evaluation under this prefix of the metrics' names begins, perhaps again."""

    def add(self, prefix: str, outputs: Any, moved: Batch, batch: Batch) -> None:
        """A batch was evaluated; on ranks that own a loss. ``moved``: on the device, images normalized."""

    def files(self, step: int, sums: Sums) -> dict[str, bytes]:
        """Return file name → content after the evaluation at ``step``; only rank 0's are written.

        Collective, without gradients and with the model in evaluation mode.
        """
        return {}


@runtime_checkable
class KeepsFiles(Protocol):
    """A task that also writes files for an evaluation."""

    def files(self, sums: dict[str, Any]) -> dict[str, bytes]:
        """Return file name → content, from the same sums as ``metrics``."""


@dataclass(frozen=True)
class TaskFiles(EvaluationOutput):
    """The files of a task, such as a confusion matrix. On rank 0 only, since they need no other rank."""

    task: KeepsFiles

    @override
    def files(self, step: int, sums: Sums) -> dict[str, bytes]:
        return {
            f"{prefix}{name}": content
            for prefix, of_prefix in sums.items()
            for name, content in self.task.files(of_prefix).items()
        }


@dataclass(frozen=True)
class EvaluationFiles:
    """Writes and withdraws ``evaluations/step-…/``. Raises StorageError or TransientStorageError."""

    paths: RunPaths

    def write(self, step: int, files: Mapping[str, bytes]) -> None:
        """Write the files of the evaluation at ``step``, each atomically."""
        for name, content in files.items():
            path = self.paths.evaluation(step) / name
            with named_errors(path):
                retried(partial(_replace, path, content), path)

    def withdraw(self, step: int) -> None:
        """Remove the files of evaluations after ``step``, from which training continues."""
        with named_errors(self.paths.evaluations):
            for evaluated_step, folder in self.paths.evaluation_folders().items():
                if evaluated_step > step:
                    remove_folder(folder)


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, sync=True) as file:
        file.write(content)


@dataclass
class Pictures(EvaluationOutput):
    """Draws the chosen samples of one run's evaluations."""

    task: DrawsPictures
    #: Indices in the validation data, ascending.
    chosen: tuple[int, ...]
    #: Mean and standard deviation (``std``) per channel with which float images were normalized.
    mean: Sequence[float]
    std: Sequence[float]
    #: Group of all ranks, for tensors on the CPU; None: the default group.
    group: dist.ProcessGroup | None = None
    #: Prefix of the metrics' names → place in ``chosen`` → this rank's pictures.
    _drawn: dict[str, dict[int, Image.Image]] = field(default_factory=dict)
    _has_failed: bool = False

    @classmethod
    def of(
        cls, experiment: Experiment, source: DataSource, task: Task, group: dist.ProcessGroup | None = None
    ) -> Pictures | None:
        """Return the run's pictures; None if the file disables them or task or data have no images."""
        count = experiment.evaluation.images
        if not isinstance(task, DrawsPictures) or source.info.sequence_length is not None:
            return None
        if count == 0 or source.val is None:
            return None
        mean, std = mean_and_std(source.info, experiment.data)
        return cls(task, evenly_spaced(len(source.val), count), mean, std, group)

    @override
    def begin(self, prefix: str) -> None:
        self._drawn[prefix] = {}

    @override
    def add(self, prefix: str, outputs: Any, moved: Batch, batch: Batch) -> None:
        """Draw the chosen samples of a batch.

        If the task raises, this rank draws nothing more, with a warning: pictures never end training.
        """
        size = len(batch.valid)
        first = batch.number * size
        for number, index in enumerate(self.chosen):
            place = index - first
            if self._has_failed or not 0 <= place < size or not batch.valid[place]:
                continue
            try:
                picture = self._picture(outputs, moved, batch.inputs, place)
            except Exception:
                self._has_failed = True
                _log.warning("predictions can't be drawn; training continues without", exc_info=True)
                continue
            if picture is not None:
                self._drawn[prefix][number] = picture

    def _picture(self, outputs: Any, moved: Batch, inputs: Tensors, place: int) -> Image.Image | None:
        images = next(images_in(inputs), None)
        if images is None:
            return None
        image = Image.fromarray(rgb(images[place], self.mean, self.std))
        picture = self.task.picture(outputs, moved, place, image)
        return None if picture is None else picture.convert("RGB")

    @override
    def files(self, step: int, sums: Sums) -> dict[str, bytes]:
        """Return, on rank 0, the sheet of each prefix that has pictures."""
        sheets = {}
        for prefix, drawn in self._drawn.items():
            pictures = on_rank_0(drawn, len(self.chosen), self.group)
            titled = [(f"sample {self.chosen[number]}", picture) for number, picture in pictures.items()]
            if titled:
                sheets[f"{prefix}{_PICTURES_FILE}"] = png(drawing.sheet(titled))
        self._drawn = {}
        return sheets


def evenly_spaced(length: int, count: int) -> tuple[int, ...]:
    """Return up to ``count`` evenly spaced indices below ``length``, starting at 0."""
    count = min(count, length)
    return tuple(number * length // count for number in range(count))


def png(image: Image.Image) -> bytes:
    """Return the image and its description as a PNG file, always identical for the same values."""
    content, text = io.BytesIO(), PngInfo()
    if description := image.info.get(drawing.DESCRIPTION):
        text.add_text(drawing.DESCRIPTION, json.dumps(description))
    image.save(content, "PNG", pnginfo=text)
    return content.getvalue()


def on_rank_0(
    drawn: dict[int, Image.Image], count: int, group: dist.ProcessGroup | None = None
) -> dict[int, Image.Image]:
    """Return on rank 0 the pictures of all ranks, numbered below ``count``, in order. Collective.

    Each picture is on one rank at most. The others add zeros, so that two reductions gather all pictures and
    their descriptions.
    """
    contents = {
        number: picture.tobytes() + json.dumps(picture.info.get(drawing.DESCRIPTION, {})).encode()
        for number, picture in drawn.items()
    }
    sizes_K3 = torch.zeros(count, 3, dtype=torch.int64)
    for number, picture in drawn.items():
        sizes_K3[number] = torch.tensor([*picture.size, len(contents[number])])
    dist.all_reduce(sizes_K3, group=group)
    lengths = sizes_K3[:, 2].tolist()
    pixels = torch.zeros(sum(lengths), dtype=torch.uint8)
    parts = pixels.split(lengths)
    for number, content in contents.items():
        parts[number].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    if len(pixels) > 0:
        dist.all_reduce(pixels, group=group)  # along the ring: a reduce would connect rank 0 with every rank
    if dist.get_rank() != 0:
        return {}
    pictures = {}
    for number, (part, (width, height, _)) in enumerate(zip(parts, sizes_K3.tolist(), strict=True)):
        if len(part) > 0:
            content, size = bytes(part.numpy()), 3 * width * height
            picture = Image.frombytes("RGB", (width, height), content[:size])
            pictures[number] = drawing.described(picture, **json.loads(content[size:]))
    return pictures


def rgb(image_CHW: Tensor, mean: Sequence[float], std: Sequence[float]) -> np.ndarray[Any, Any]:
    """Return an image of a loader's batch as (H, W, 3) uint8.

    The normalization of float images is undone; they are rescaled from black to white if they exceed that
    range. Images with one or two channels are gray; of more than three channels the first three are shown.
    """
    channels = len(image_CHW)
    values_CHW = image_CHW.cpu()
    if values_CHW.dtype != torch.uint8:
        values_CHW = values_CHW.double().nan_to_num(0.0, 0.0, 0.0)
        if image_CHW.is_floating_point() and len(mean) == len(std) == channels:
            scale, offset = (
                torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (std, mean)
            )
            values_CHW = values_CHW * scale + offset
        low, high = float(values_CHW.min()), float(values_CHW.max())
        if low < -_TOLERANCE or high > 1 + _TOLERANCE:
            values_CHW = (values_CHW - low) / max(high - low, 1e-12)
        values_CHW = (255 * values_CHW.clamp(0, 1)).round().to(torch.uint8)
    shown_CHW = values_CHW[:3] if channels >= 3 else values_CHW[:1].expand(3, -1, -1)
    return shown_CHW.permute(1, 2, 0).contiguous().numpy()


def images_in(inputs: Tensors) -> Iterator[Tensor]:
    """Yield the images (B, C, H, W) of a batch; in a structure only bytes, as in ``Normalize``."""
    for part in tensors_of(inputs):
        is_image = part.dim() == 4 and part.dtype != torch.int64 and part[:1].numel() > 0
        if is_image and (part.dtype == torch.uint8 or not is_structured(inputs)):
            yield part


@dataclass(frozen=True)
class TextSamples(EvaluationOutput):
    """Generates the text of one run's evaluations. ``outputs``: batch → logits (1, T, V)."""

    outputs: Callable[[Batch], Tensor]
    info: DataInfo
    seed: int
    prompt: tuple[int, ...]
    num_tokens: int

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        source: DataSource,
        task: Task,
        outputs: Callable[[Batch], Tensor],
    ) -> TextSamples | None:
        """Return the generator of samples; None if the file disables it or the strategy has stages."""
        length, count = source.info.sequence_length, experiment.evaluation.sample_tokens
        has_stages = traits_of(experiment.parallel.strategy).has_stages
        if not isinstance(task, CausalLM) or not isinstance(source.val, ArraySplit):
            return None
        if length is None or count == 0 or has_stages:
            return None
        first, _ = source.val.batch(torch.tensor([0]))
        assert isinstance(first, Tensor), "tokens"
        prompt = first[0, : max(1, min(_PROMPT_TOKENS, length // 2))].tolist()
        return cls(outputs, source.info, experiment.seed, tuple(prompt), count)

    @override
    def files(self, step: int, sums: Sums) -> dict[str, bytes]:
        tokens = continued(self.outputs, self.prompt, self.num_tokens, self.info, self.seed, step)
        decoder = decoder_of(self.info)
        parts = self.prompt, tokens[len(self.prompt) :]
        texts = (" ".join(map(str, part)) if decoder is None else decoder.decode(part) for part in parts)
        return {_TEXT_FILE: (_BETWEEN.join(texts) + "\n").encode(errors="replace")}


def continued(
    outputs: Callable[[Batch], Tensor],
    prompt: Sequence[int],
    num_tokens: int,
    info: DataInfo,
    seed: int,
    step: int,
) -> list[int]:
    """Return the prompt and ``num_tokens`` tokens after it, with exactly ``num_tokens`` calls of ``outputs``.

    Each is drawn from the 40 most probable tokens. The input always has the shape (1, T), so that the model
    is compiled once; padding after the last token changes nothing in a causal model.
    """
    length = info.sequence_length
    assert length is not None, "tokens"
    tokens = list(prompt)
    for place in range(num_tokens):
        window = tokens[-length:]
        inputs_1T = torch.tensor([window + [0] * (length - len(window))])
        valid = torch.ones(1, dtype=torch.bool)
        logits_V = outputs(Batch(step, place, 1.0, inputs_1T, inputs_1T, valid))[0, len(window) - 1]
        number = Keys(seed, step, torch.tensor([place])).uniform("text sample").item()
        # The vocabulary may be padded; padding tokens can't be decoded.
        tokens.append(drawn(logits_V[: info.num_classes], number))
    return tokens


def drawn(logits_V: Tensor, number: float) -> int:
    """Return the token that ``number``, in [0, 1), selects from the most probable tokens.

    Computed in float64 on the CPU, so that order and rounding don't depend on the device.
    """
    values_K, tokens_K = logits_V.double().cpu().sort(descending=True, stable=True)
    ends_K = values_K[:_TOP_K].softmax(0).cumsum(0)
    place = int(torch.searchsorted(ends_K, number, right=True))
    return int(tokens_K[min(place, len(ends_K) - 1)])
