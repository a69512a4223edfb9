"""Transforms of torchvision, of timm and of the user, one sample at a time under the sample's own seed.

Torch's, Python's and NumPy's generators are seeded by (seed, epoch, sample, repeat) before each call. So a
sample's result does not depend on its batch, its process or the number of ranks, and is the same after a
resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import AugmentConfig, RandAugmentConfig, TransformConfig
from hpc_train.registry import load
from hpc_train.run.tracebacks import users_frame
from hpc_train.training.datasets.base import call
from hpc_train.training.datasets.decoding import EncodedImage, decoded
from hpc_train.training.datasets.images import as_inputs
from hpc_train.training.datasets.random_numbers import Keys, restored_generators, seed_generators
from hpc_train.training.datasets.targets import as_target
from hpc_train.training.datasets.types import TargetSpec, TargetSpecs, Tensors, map_tensors

_KEY = "data.transform"
#: The highest magnitude of torchvision's RandAugment, which has 31.
_MAX_MAGNITUDE = 30
_AUTOAUGMENT = {"autoaugment": "imagenet", "autoaugment_cifar10": "cifar10", "autoaugment_svhn": "svhn"}
_Sample = TypeVar("_Sample")
_Result = TypeVar("_Result")
ImageTransform = Callable[[Tensor], Tensor]


def seeded(
    function: Callable[[_Sample], _Result], samples: Iterable[_Sample], keys: Keys, draw: str
) -> list[_Result]:
    """Return ``function`` of each sample, called with the generators seeded by the sample's number ``draw``.

    The generators are restored afterwards.
    """
    results = []
    with restored_generators():
        for sample, word in zip(samples, keys.words(draw).tolist(), strict=True):
            seed_generators(word)
            results.append(function(sample))
    return results


def photometric_transforms(config: AugmentConfig) -> list[ImageTransform]:
    """Return the transforms of (C, H, W) uint8, C 1 or 3, for color jitter, RandAugment and policy."""
    transforms: list[ImageTransform] = []
    if config.color_jitter is not None:
        from torchvision.transforms import v2

        transforms.append(v2.ColorJitter(**config.color_jitter.model_dump()))
    if config.randaugment is not None:
        is_timm = config.randaugment.operations == "timm"
        transforms.append((_timm_randaugment if is_timm else _randaugment)(config.randaugment))
    if config.policy is not None:
        transforms.append(_policy(config.policy))
    return transforms


def _policy(name: str) -> ImageTransform:
    from torchvision.transforms import v2

    if name == "trivialaugment":
        return v2.TrivialAugmentWide()
    return v2.AutoAugment(v2.AutoAugmentPolicy(_AUTOAUGMENT[name]))


def _randaugment(config: RandAugmentConfig) -> ImageTransform:
    """Return torchvision's RandAugment, its magnitude and each operation drawn if the file says so."""
    from torchvision.transforms import v2

    probability = 1.0 if config.probability is None else config.probability
    if probability == 1 and config.magnitude_std == 0:
        return v2.RandAugment(config.num_ops, config.magnitude)
    operations = [v2.RandAugment(num_ops=1, magnitude=magnitude) for magnitude in range(_MAX_MAGNITUDE + 1)]

    def transform(image: Tensor) -> Tensor:
        for _ in range(config.num_ops):
            magnitude = config.magnitude + config.magnitude_std * torch.randn(()).item()
            if torch.rand(()).item() < probability:
                image = operations[min(max(round(magnitude), 0), _MAX_MAGNITUDE)](image)
        return image

    return transform


def _timm_randaugment(config: RandAugmentConfig) -> ImageTransform:
    """Return timm's RandAugment, which takes PIL images of three channels."""
    from timm.data.auto_augment import rand_augment_transform

    probability = 0.5 if config.probability is None else config.probability
    name = f"rand-m{config.magnitude}-n{config.num_ops}-mstd{config.magnitude_std}-p{probability}-inc1"
    augment = rand_augment_transform(name, {})

    def transform(image: Tensor) -> Tensor:
        pixels = augment(_as_pil(image.expand(3, -1, -1)))
        return torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[: len(image)]

    return transform


class OwnTransform:
    """``data.transform``: the callable that a factory returns, applied to training samples.

    It receives the inputs of one sample, uint8 images of 1, 3 or 4 channels as PIL images, and returns inputs
    in any form that a data set may return. For images whose masks or boxes move with them it receives and
    returns ``(image, target)``; masks and boxes are ``torchvision.tv_tensors``. Raises BadFileError if the
    user's code raises, and UndecodableError.
    """

    def __init__(self, config: TransformConfig, channels: int | None) -> None:
        self._name = config.name
        self._channels = channels
        factory = load("transforms", config.name)
        if not callable(factory):
            kind = type(factory).__name__
            raise BadFileError(f"{_KEY}: {config.name!r} is {kind}; name a function or a class")
        try:
            self._function: Any = call(f"{_KEY}.args", config.name, factory, **config.args)
        except BadFileError as error:
            if config.args:
                raise
            raise BadFileError(
                f"{error}; name a function that returns the transform, or its class"
            ) from error
        except Exception as error:
            raise BadFileError(f"{_KEY}: {config.name} raised {_cause(error)}; fix it there") from error
        if not callable(self._function):
            raise BadFileError(
                f"{_KEY}: {config.name} returned {type(self._function).__name__}; return a function of one "
                "sample, or name a class whose objects can be called"
            )

    def inputs(self, inputs: Sequence[Tensors | EncodedImage], keys: Keys, indices: Tensor) -> list[Tensors]:
        """Return the transformed inputs of the samples with these ``indices``, one by one."""

        def transform(sample: tuple[Tensors | EncodedImage, int]) -> Tensors:
            sample_inputs, index = sample
            return self._as_inputs(self._result(index, sample_inputs), index)

        return seeded(transform, zip(inputs, indices.tolist(), strict=True), keys, _KEY)

    def with_targets(
        self,
        images: Sequence[Tensor | EncodedImage],
        targets: Tensors,
        spec: TargetSpecs,
        keys: Keys,
        indices: Tensor,
    ) -> tuple[list[Tensor], Tensors]:
        """Return transformed images and targets, masks and ragged targets as lists of one per image."""
        specs: Any = spec if isinstance(targets, dict) else {"": spec}
        batch_parts: dict[str, Any] = targets if isinstance(targets, dict) else {"": targets}

        def transform(sample: tuple[int, int, Tensor | EncodedImage]) -> tuple[Tensor, dict[str, Tensor]]:
            place, index, image = sample
            sides = tuple(image.shape[-2:])
            parts = {
                name: _wrapped(part[place], specs.get(name), sides) for name, part in batch_parts.items()
            }
            result = self._result(index, image, parts.get("", parts))
            if not (isinstance(result, tuple) and len(result) == 2):
                raise self._error(index, f"returned {type(result).__name__}; return (image, target)")
            return self._as_inputs(result[0], index), self._as_parts(result[1], parts, specs, index)

        samples = seeded(
            transform, zip(range(len(images)), indices.tolist(), images, strict=True), keys, _KEY
        )
        moved: dict[str, Any] = {name: [parts[name] for _, parts in samples] for name in batch_parts}
        for name, part in batch_parts.items():
            if isinstance(part, Tensor) and _geometry(specs, name) != "mask":
                moved[name] = torch.stack(moved[name])
        return [image for image, _ in samples], moved if isinstance(targets, dict) else moved[""]

    def _result(self, index: int, inputs: Tensors | EncodedImage, *target: Any) -> Any:
        argument = map_tensors(_as_pil, decoded(inputs))
        try:
            return self._function(argument, *target)
        except MemoryError:
            raise
        except Exception as error:
            raise self._error(index, f"raised {_cause(error)}; fix it there") from error

    def _as_inputs(self, result: Any, index: int) -> Tensors:
        try:
            return map_tensors(_plain, as_inputs(result, self._channels))
        except (BadFileError, TypeError, ValueError, RuntimeError) as error:
            why = str(error).removeprefix("data: ")
            raise self._error(index, f"returned what can't be an input: {why}") from error

    def _as_parts(
        self, result: Any, names: Iterable[str], specs: Mapping[str, TargetSpec | None], index: int
    ) -> dict[str, Tensor]:
        parts = result if isinstance(result, dict) else {"": result}
        if missing := [name for name in names if name not in parts]:
            raise self._error(index, f"returned a target without {missing[0]!r}; return all its parts")
        tensors = {name: _plain(parts[name]) for name in names}
        rows = {name: len(tensors[name]) for name in names if _geometry(specs, name) in ("boxes", "per box")}
        if len(set(rows.values())) > 1:
            counts = ", ".join(f"{count} rows of {name}" for name, count in rows.items())
            raise self._error(index, f"returned {counts}; return one row per box in each")
        return tensors

    def _error(self, index: int, problem: str) -> BadFileError:
        return BadFileError(f"{_KEY}: {self._name}, called for sample {index}, {problem}")


def _geometry(specs: Mapping[str, TargetSpec | None], name: str) -> str | None:
    spec = specs.get(name)
    return None if spec is None else spec.geometry


def _as_pil(image: Tensor) -> Image.Image | Tensor:
    """Return (C, H, W) uint8 with 1, 3 or 4 channels as a PIL image, other tensors unchanged."""
    if image.dtype != torch.uint8 or image.dim() != 3 or len(image) not in (1, 3, 4):
        return image
    return Image.fromarray((image[0] if len(image) == 1 else image.permute(1, 2, 0)).contiguous().numpy())


def _wrapped(target: Tensor, spec: TargetSpec | None, sides: tuple[int, ...]) -> Tensor:
    """Return a mask or boxes as the tv_tensor that torchvision's transforms move with the image."""
    from torchvision import tv_tensors

    geometry = None if spec is None else spec.geometry
    if geometry == "mask":
        return tv_tensors.Mask(target)
    if geometry == "boxes":
        return tv_tensors.BoundingBoxes(target, format="XYXY", canvas_size=sides)
    return target


def _plain(tensor: Any) -> Tensor:
    """Return a result as a plain tensor; boxes of another format as corners."""
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import functional as tvf

    if isinstance(tensor, tv_tensors.BoundingBoxes):
        tensor = tvf.convert_bounding_box_format(tensor, new_format=tv_tensors.BoundingBoxFormat.XYXY)
    return as_target(tensor).as_subclass(Tensor)


def _cause(error: Exception) -> str:
    """Return the type and message of an error, and the line of the user's code that raised it."""
    frame = users_frame(error)
    return f"{type(error).__name__}: {error}" + (f" ({frame})" if frame else "")
