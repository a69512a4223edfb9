"""``hpc-train export RUN -o FILE.onnx`` and ``FILE.pt2``: a run's model as a program without Python code.

torch traces the module of ``load_model`` with two samples; the number of samples in a batch stays variable.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hpc_train.errors import BadFileError, HpcTrainError, printable
from hpc_train.experiment.data_facts.by_name import image_shape
from hpc_train.registry import importing
from hpc_train.training.checkpoint.inference import LoadedModel
from hpc_train.training.datasets.batches import try_samples
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.normalize import mean_and_std
from hpc_train.training.datasets.types import Tensors

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
        source = build_source(model.experiment.data)
        batch = try_samples(source, model.experiment, model.target_spec)[0][-1]
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
