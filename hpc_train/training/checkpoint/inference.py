"""``hpc_train.load_model``: a run's model for inference in any Python process.

The model is built like on ranks, from the run's experiment by the code of its snapshot, and gets the weights
of a checkpoint. Neither the data nor a scheduler is needed: checkpoints contain the facts about the data.

``hpc-train export RUN -o FILE.onnx`` and ``FILE.pt2`` write it as a program without Python code: torch traces
the module with two samples; the number of samples in a batch stays variable.
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hpc_train.errors import BadFileError, HpcTrainError, UsageError, printable
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.data_facts.by_name import image_shape
from hpc_train.package_path import hidden_modules
from hpc_train.paths import RunPaths
from hpc_train.registry import importing
from hpc_train.run import attempts, create, trust
from hpc_train.run.code.snapshot import check_owner, check_whole, linked, search_path
from hpc_train.run.weight_source import without_files
from hpc_train.training.checkpoint.export import find_intact, plain_weights, uses_ema
from hpc_train.training.checkpoint.saved_tensors import SavedState
from hpc_train.training.checkpoint.shards import Entry
from hpc_train.training.datasets import batches, building, tokenization
from hpc_train.training.datasets.base import RawInput
from hpc_train.training.datasets.normalize import Normalize, mean_and_std
from hpc_train.training.datasets.types import DataInfo, TargetSpecs, Tensors
from hpc_train.training.models.building import build_model
from hpc_train.training.models.preprocessing import with_preprocessing
from hpc_train.training.tasks.base import make_task, target_spec


@dataclass(frozen=True, repr=False)
class LoadedModel:
    """A run's model with the weights of a checkpoint, and what is needed to use it."""

    #: The plain module, on the CPU in evaluation mode; float32, or float64 under ``precision: fp64``.
    module: nn.Module
    #: By class number; empty if the data have no names.
    class_names: tuple[str, ...]
    #: The step of the checkpoint.
    step: int
    #: Whether these are the EMA weights.
    is_ema: bool
    #: The experiment file of the run, with ``data.normalize`` resolved to numbers.
    experiment: Experiment
    #: The classes, channels and normalization of the training data.
    data: DataInfo
    target_spec: TargetSpecs

    def __repr__(self) -> str:
        """Fit on a line, for notebooks: the module and the experiment have thousands of characters."""
        weights = " EMA" if self.is_ema else ""
        of = self.experiment
        return f"LoadedModel({of.model.name!r}, step={self.step}{weights}, run of {of.name!r})"

    def preprocess(self, *samples: RawInput | str | Path) -> Tensors:
        """Return the module's input for these samples, prepared as in an evaluation of the run.

        A sample is the path of an image, a PIL image, an array (H, W, C), a tensor (C, H, W), or an input as
        the run's data set returns it; the result is a batch, normalized, for images (B, C, H, W). For
        language models a sample is a text, and the result has its tokens, (B, T) int64. Warns of images
        unlike those of the training: of another size, or of floating point instead of uint8.
        """
        if self.data.sequence_length is not None:
            return self._tokens(samples)
        inputs = batches.prepared_inputs(samples, self.data.channels, self.experiment, self.target_spec)
        if isinstance(inputs, Tensor):
            self._warn_of_other_images(inputs)
        return self.normalize(inputs)

    @property
    def normalize(self) -> Normalize:
        """Converts a batch as the data set returns it to the module's dtype and range of values."""
        dtype = torch.float64 if self.experiment.precision == "fp64" else torch.float32
        return Normalize(self.data, self.experiment.data, dtype)

    def _warn_of_other_images(self, inputs: Tensor) -> None:
        data, shape = self.experiment.data, tuple(inputs.shape[2:])
        expected = image_shape(data)
        if expected is not None and shape != expected:
            sizes = " and ".join(f"{height} × {width}" for height, width in (shape, expected))
            warnings.warn(
                f"preprocess: these images and those of the training have {sizes} pixels; resize them",
                stacklevel=3,
            )
        if expected is not None and inputs.is_floating_point() and data.value_range is None:
            warnings.warn(
                "preprocess: images of floating point count as normalized; those of the training were uint8 "
                "(0 to 255), pass such",
                stacklevel=3,
            )

    def decode(self, tokens: Sequence[int] | Tensor) -> str:
        """Return the text of tokens of a language model. Raises UsageError without its tokenizer."""
        decoder = tokenization.decoder_of(self.data)
        if decoder is None:
            raise UsageError("decode: the tokenizer of the run's data is not on this machine")
        return decoder.decode(tokens.tolist() if isinstance(tokens, Tensor) else tokens)

    def _tokens(self, texts: Sequence[Any]) -> Tensor:
        encode = getattr(tokenization.decoder_of(self.data), "encode", None)
        if encode is None or not all(isinstance(text, str) for text in texts):
            raise UsageError(
                "preprocess: this run's model takes tokens, and its tokenizer on this machine encodes only "
                "texts, or none; call the module with a tensor (B, T) int64"
            )
        rows = [torch.from_numpy(tokens.astype("int64")) for tokens in encode(texts)]
        if len({len(row) for row in rows}) != 1:
            raise UsageError("preprocess: texts of different numbers of tokens; pass one text at a time")
        return torch.stack(rows)


def load_model(
    run: RunPaths, *, best: bool | None, step: int | None, ema: bool | None, uses_snapshot: bool = True
) -> LoadedModel:
    """Build the model and load the checkpoint that ``find_intact`` selects.

    ``ema``: None for the EMA weights if ``checkpoint.best`` follows a metric of theirs. ``uses_snapshot``:
    import the user's modules from the run's snapshot. Raises UsageError if there is no such checkpoint or no
    EMA, StorageError if it is damaged, BadFileError if the model can't be built or is another one.
    """
    trust.check_run(run)
    checkpoint = find_intact(run, best=best, step=step)
    saved = SavedState.read(checkpoint)
    ema = uses_ema(run, saved, ema)
    experiment = with_preprocessing(create.training_experiment(run, attempts.newest_number(run)))
    with _importing_from(_code_folders(run) if uses_snapshot else []):
        info = _data_info(experiment, saved)
        spec = target_spec(make_task(experiment, info))
        module = _built(experiment, info)
    _load_weights(module, experiment.model.name, plain_weights(checkpoint, saved, ema=ema))
    module.eval().requires_grad_(False)
    return LoadedModel(module, info.class_names, checkpoint.step, ema, experiment, info, spec)


def _built(experiment: Experiment, info: DataInfo) -> nn.Module:
    module = build_model(without_files(experiment).model, info)
    return module.double() if experiment.precision == "fp64" else module


def _load_weights(module: nn.Module, name: str, weights: Mapping[str, Entry]) -> None:
    try:
        module.load_state_dict({key: entry.read() for key, entry in weights.items()})
    except RuntimeError as error:
        lines = "\n".join(str(error).splitlines()[:4])
        raise BadFileError(
            f"model.name: {name} as its code builds it now is not the model of the checkpoint: {lines}\n"
            "restore the code, or omit code"
        ) from error


def _data_info(experiment: Experiment, saved: SavedState) -> DataInfo:
    """Return the facts about the training data, from the checkpoint or, if it lacks them, from the data."""
    data = saved.extra.get("data") or {}
    try:
        return TypeAdapter(DataInfo).validate_python(data["info"])
    except KeyError:
        info = building.build_source(experiment.data).info
        return replace(info, mean=tuple(data.get("mean", info.mean)), std=tuple(data.get("std", info.std)))
    except ValidationError as error:
        raise BadFileError(f"checkpoint: its facts about the data are damaged: {error}") from error


def _code_folders(run: RunPaths) -> list[str]:
    """Return the folders of the user's modules in the run's snapshot, checked; empty if it has none."""
    snapshot = linked(run)
    if snapshot is None:
        return []
    check_owner(snapshot)
    check_whole(snapshot)
    return search_path(run)[1:]  # the first one has this package


@contextmanager
def _importing_from(folders: Sequence[str]) -> Iterator[None]:
    """Import the user's modules from these folders within the context.

    Modules of the same names that are imported already are hidden meanwhile, since they may be of other code.
    """
    own = {path.stem for folder in folders for path in Path(folder).iterdir()}
    own -= {"hpc_train", *sys.stdlib_module_names}
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in own}
    before = list(sys.path)
    # As on ranks: a user's module must not replace one of Python's.
    late = [folder for folder in folders if hidden_modules(folder)]
    sys.path[:] = [*(folder for folder in folders if folder not in late), *before, *late]
    for name in hidden:
        del sys.modules[name]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before
        sys.modules.update(hidden)


#: Maximum bytes of weights in an ONNX file: its protobuf is limited to 2 GiB, and the graph needs the rest.
_ONNX_MAX_BYTES = 2**31 - 2**24
#: Largest difference to PyTorch, relative to the largest output. Measured: up to 1e-5 in float32.
_TOLERANCE = 1e-3
#: Lines of torch's error that a message shows.
_CAUSE_LINES = 4


def write_program(model: LoadedModel, path: Path, suffix: str, metadata: dict[str, str]) -> None:
    """Write ``model`` to ``path`` in the format of ``suffix``, with the facts that its users need.

    Raises BadFileError if a package is missing, the model can't be traced, or ONNX Runtime, if it is
    installed, computes other outputs.
    """
    is_onnx = suffix == ".onnx"
    inputs = example_inputs(model)
    if is_onnx:
        with importing("onnxscript", "onnx", needed_by="-o FILE.onnx", otherwise=", or write FILE.pt2"):
            import onnxscript  # noqa: F401
        _refuse_too_large(model)
        model.module.float()  # ONNX Runtime lacks float64 convolutions, among others
        inputs = pytree.tree_map(lambda part: part.float() if part.is_floating_point() else part, inputs)
    batch = torch.export.Dim("batch")
    shapes = (pytree.tree_map(lambda _: {0: batch}, inputs),)
    facts = {**metadata, **_facts(model)}
    with _failing(model.experiment.model.name, suffix):
        program = torch.export.export(model.module, (inputs,), dynamic_shapes=shapes)
        if not is_onnx:
            with path.open("wb") as file:
                torch.export.save(program, file, extra_files={f"{key}.json": facts[key] for key in facts})
            return
        names: Any = {"input_names": ["input"], "output_names": ["output"]}
        leaves = len(pytree.tree_leaves(inputs)), len(pytree.tree_leaves(model.module(inputs)))
        exported = torch.onnx.export(
            program, dynamic_shapes=shapes, verbose=False, **(names if leaves == (1, 1) else {})
        )
        assert exported is not None, "torch's exporter returns a program"
        exported.model.metadata_props.update(facts)
        exported.save(path, external_data=False)
    _compare(model, path, inputs)


def example_inputs(model: LoadedModel) -> Tensors:
    """Return the module's inputs for two samples: random ones, or if their size is unknown those of the data.

    Raises BadFileError if the data are not there then.
    """
    info, shape = model.data, image_shape(model.experiment.data)
    if info.sequence_length is not None:
        return torch.randint(info.num_classes, (2, info.sequence_length))
    if shape is not None:
        return model.preprocess(*torch.randint(256, (2, info.channels, *shape), dtype=torch.uint8))
    try:
        source = building.build_source(model.experiment.data)
        batch = batches.try_samples(source, model.experiment, model.target_spec)[0][-1]
    except HpcTrainError as error:
        raise BadFileError(
            f"data: an export needs an input of the model, and the data are not here: {error}; put them "
            "back, or export the weights: -o FILE.safetensors"
        ) from error
    return model.normalize(batch.taken([0, -1]).inputs)


def _facts(model: LoadedModel) -> dict[str, str]:
    """Return key → JSON: the model's name, the classes, and the normalization of images of 0…1."""
    mean, std = mean_and_std(model.data, model.experiment.data)
    facts = {"model": model.experiment.model.name, "classes": model.class_names}
    pixels = {"mean": mean, "std": std} if model.data.sequence_length is None else {}
    return {key: json.dumps(value) for key, value in (facts | pixels).items()}


def _refuse_too_large(model: LoadedModel) -> None:
    nbytes = sum(tensor.nbytes for tensor in model.module.state_dict().values())
    if nbytes > _ONNX_MAX_BYTES:
        raise BadFileError(
            f"-o FILE.onnx: {model.experiment.model.name} has {nbytes / 2**30:.1f} GiB of weights, and an "
            "ONNX file holds at most 2; write FILE.pt2"
        )


@contextmanager
def _failing(name: str, suffix: str) -> Iterator[None]:
    """Raise BadFileError with the first lines of the cause for an error of torch or the model's code.

    Their output is dropped: torch prints the whole graph if it can't trace it.
    """
    output = io.StringIO()
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(output), redirect_stderr(output):
            warnings.simplefilter("ignore")
            yield
    except (HpcTrainError, OSError, MemoryError):
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        lines = [line.rstrip()[:300] for line in str(cause).splitlines() if line.strip()][:_CAUSE_LINES]
        text = printable("\n".join(lines))
        raise BadFileError(
            f"model.name: {name} can't be exported as {suffix}: {type(cause).__name__}: {text}\nchange this "
            "part of the model (docs/deploying.md), or export the weights: -o FILE.safetensors"
        ) from error
    finally:
        logging.disable(before)


def _compare(model: LoadedModel, path: Path, inputs: Tensors) -> None:
    """Raise BadFileError if ONNX Runtime computes other outputs for one sample and for two."""
    with suppress(ImportError):
        import onnxruntime

        session = onnxruntime.InferenceSession(path.read_bytes())
        for count in (1, 2):
            batch = pytree.tree_map(lambda part, count=count: part[:count], inputs)
            arrays = (part.numpy() for part in pytree.tree_leaves(batch))
            feed = dict(zip((entry.name for entry in session.get_inputs()), arrays, strict=True))
            expected = pytree.tree_leaves(model.module(batch))
            for output, wanted in zip(session.run(None, feed), expected, strict=True):
                largest = float(wanted.nan_to_num(0, 0, 0).abs().max().clamp(min=1e-6))
                limits: Any = {"rtol": 0, "atol": _TOLERANCE * largest, "equal_nan": True}
                try:
                    torch.testing.assert_close(torch.from_numpy(output), wanted, **limits)
                except AssertionError as error:
                    raise BadFileError(
                        f"model.name: {model.experiment.model.name} computes other outputs in ONNX Runtime: "
                        f"{error}\nwrite FILE.pt2"
                    ) from error
