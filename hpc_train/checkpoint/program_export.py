"""``hpc-train export --format onnx`` and ``torch-export``: a model as a program that needs no Python code.

Called by ``checkpoint.export``. The model is built like on ranks, loaded with the checkpoint's weights
(adapters merged), and traced with samples of the run's data. The file is run before it is committed.
"""

from __future__ import annotations

import inspect
import io
import json
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hpc_train.checkpoint.shards import Entry
from hpc_train.config.schema import Experiment
from hpc_train.datasets.base import DataSource
from hpc_train.datasets.batches import try_samples
from hpc_train.datasets.building import build_source
from hpc_train.datasets.normalize import Normalize, mean_and_std
from hpc_train.datasets.types import Batch
from hpc_train.errors import BadFileError, HpcTrainError
from hpc_train.models.building import build_model
from hpc_train.models.preprocessing import with_preprocessing
from hpc_train.paths import RunPaths
from hpc_train.run import frozen_experiment
from hpc_train.run.attempts import newest_number
from hpc_train.run.create import noted_changes
from hpc_train.run.files import sync_file
from hpc_train.run.tracebacks import shortened_traceback, users_traceback
from hpc_train.tasks.base import Task, make_task, target_spec

#: Runs the written file on the arguments of a call; returns its outputs in their order.
Program = Callable[["Call"], list[Any]]

#: Relative to the largest output. Measured: up to 1e-5 between ONNX Runtime and PyTorch in float32.
_TOLERANCE = 1e-3
#: Maximum bytes of weights: the protobuf of an ONNX file is limited to 2 GiB, and the graph needs the rest.
_ONNX_MAX_BYTES = 2**31 - 2**24
#: Maximum lines of a failed export's cause in a message, and their maximum length.
_CAUSE_LINES, _CAUSE_WIDTH = 4, 300
#: The file of facts inside a ``.pt2``, and the key of the facts in an ONNX file.
FACTS = "hpc_train.json"


@dataclass(frozen=True)
class Call:
    """The task's call of the model for a batch, and the outputs in PyTorch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any

    @property
    def inputs(self) -> list[Any]:
        """The arguments without their structure, in the order of the program's inputs."""
        return list(pytree.tree_leaves((self.args, self.kwargs)))


@dataclass(frozen=True)
class Model:
    """A run's model with its weights, and calls of it with batches of different sizes."""

    name: str
    module: nn.Module
    #: A batch of 2 for tracing, then batches of 1 and of 2 other samples for comparison.
    traced: Call
    compared: tuple[Call, Call]
    #: Information for users of the file: the normalization of inputs, the classes.
    facts: dict[str, Any]


def load_model(run: RunPaths, weights: Mapping[str, Entry], form: str) -> Model:
    """Build the run's model on the CPU, in evaluation mode, and call it with samples of its data.

    Its dtype is float32, or under fp64 float64 unless ``form`` is onnx. Raises BadFileError if the data or
    the model can't be built, or the weights belong to another model.
    """
    changes = noted_changes(run, newest_number(run))
    experiment = with_preprocessing(frozen_experiment.load_changed(run, changes).experiment)
    try:
        return _loaded(experiment, weights, form)
    except (HpcTrainError, OSError, MemoryError):
        raise
    except Exception as error:  # any error of the code of the model, the task and the data
        shown = users_traceback(error) or shortened_traceback(traceback.format_exc())
        raise BadFileError(
            f"{shown}\nmodel.name: {experiment.model.name} raised this while it was built and called with "
            "samples; restore the code that the run was trained with"
        ) from error


def _loaded(experiment: Experiment, weights: Mapping[str, Entry], form: str) -> Model:
    source = build_source(experiment.data)
    task = make_task(experiment, source.info)
    batch = try_samples(source, experiment, target_spec(task))[0][-1]
    # ONNX Runtime lacks float64 convolutions, among others.
    is_double = experiment.precision == "fp64" and form != "onnx"
    dtype = torch.float64 if is_double else torch.float32
    model = build_model(experiment.model, source.info).to(dtype)
    _load(model, experiment.model.name, weights)
    model.eval().requires_grad_(False)
    normalize = Normalize(source.info, experiment.data, dtype)

    def call(*indices: int) -> Call:
        taken = batch.taken([index % len(batch.valid) for index in indices])
        return _call(model, task, replace(taken, inputs=normalize(taken.inputs)))

    # Samples other than those of the trace reveal values that tracing has made constant.
    return Model(experiment.model.name, model, call(0, 1), (call(2), call(3, 2)), _facts(experiment, source))


def _load(model: nn.Module, name: str, weights: Mapping[str, Entry]) -> None:
    try:
        model.load_state_dict({key: entry.read() for key, entry in weights.items()})
    except RuntimeError as error:
        raise BadFileError(
            f"model.name: {name} as its code builds it now is not the model of the checkpoint: "
            f"{_first_lines(str(error))}\nrestore the code, or export the weights alone: -o FILE.safetensors"
        ) from error


def _call(model: nn.Module, task: Task, batch: Batch) -> Call:
    """Return the call of ``model`` by ``task``, or with the inputs if ``task.forward`` does not call it."""
    calls: list[Call] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        calls.append(Call(args, kwargs, outputs))

    hook = model.register_forward_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            task.forward(model, batch)
            if not calls:
                model(batch.inputs)
    finally:
        hook.remove()
    return calls[0]


def _facts(experiment: Experiment, source: DataSource) -> dict[str, Any]:
    info = source.info
    mean, std = mean_and_std(info, experiment.data)
    return {"model": experiment.model.name, "task": experiment.task, "classes": list(info.class_names)} | (
        {} if info.sequence_length is not None else {"mean": list(mean or ()), "std": list(std or ())}
    )


def export_program(model: Model, path: Path, form: str, metadata: dict[str, str]) -> dict[str, Any]:
    """Write the program in the format ``form`` to ``path``, synced to disk, and run it.

    Returns its inputs and the largest difference to PyTorch. Raises BadFileError if the model can't be
    exported or the program's outputs differ; the caller removes the file.
    """
    if form == "onnx":
        _refuse_too_large(model)
    facts = json.dumps(metadata | model.facts)
    with _failing(model, form, "can't be exported"):
        exported = _traced(model)
        write = _write_onnx if form == "onnx" else _write_torch_export
        write(exported, model, path, facts)
    with path.open("rb") as file:
        sync_file(file.fileno())
    with _failing(model, form, "was exported, but the file does not run"):
        program = _load_onnx(path) if form == "onnx" else _load_torch_export(path)
        results = [program(call) for call in model.compared]
    difference = max(
        _difference(model, form, call, outputs) for call, outputs in zip(model.compared, results, strict=True)
    )
    return {"inputs": _shapes(model), "max_difference": difference}


def _refuse_too_large(model: Model) -> None:
    nbytes = sum(tensor.nbytes for tensor in model.module.state_dict().values())
    if nbytes > _ONNX_MAX_BYTES:
        raise BadFileError(
            f"--format onnx: {model.name} has {nbytes / 2**30:.1f} GiB of weights, and an ONNX file holds at "
            "most 2; write --format torch-export -o FILE.pt2"
        )


@contextmanager
def _failing(model: Model, form: str, problem: str) -> Iterator[None]:
    """Raise BadFileError, with the first lines of the cause, for errors of torch or the model's code.

    Their output is dropped: torch prints the whole graph if it can't trace it.
    """
    lost = io.StringIO()
    try:
        with warnings.catch_warnings(), redirect_stdout(lost), redirect_stderr(lost), _no_logs():
            warnings.simplefilter("ignore")
            yield
    except (HpcTrainError, OSError, MemoryError):
        raise
    except Exception as error:
        raise BadFileError(
            f"{model.name}: {problem} as {form}: {_cause(error)}\n"
            "change this part of the model (programs can't branch on values, and have a fixed set of "
            "operators), choose another --format, or export the weights alone: -o FILE.safetensors"
        ) from error


@contextmanager
def _no_logs() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _cause(error: BaseException) -> str:
    """Return the innermost cause in a few lines, with the line of the model that torch names."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error)
    _, marker, place = text.partition("The following call raised this error:")
    where = f"\n{_first_lines(place, 2)}" if marker else ""
    return f"{type(error).__name__}: {_first_lines(text.partition('Caused by:')[0])}{where}"


def _first_lines(text: str, count: int = _CAUSE_LINES) -> str:
    lines = [line.rstrip()[:_CAUSE_WIDTH] for line in text.splitlines() if line.strip()]
    return "\n".join(lines[:count])


def _traced(model: Model) -> torch.export.ExportedProgram:
    call = model.traced
    return torch.export.export(
        model.module, call.args, call.kwargs, dynamic_shapes=_dynamic_shapes(model), strict=False
    )


def _dynamic_shapes(model: Model) -> dict[str, Any]:
    """Return the batch dimension of each argument that has one, by the model's parameter names."""
    batch = torch.export.Dim("batch")
    one = model.compared[0]

    def dimensions(two: Any, one: Any) -> Any:
        return {0: batch} if isinstance(two, Tensor) and two.dim() and len(two) != len(one) else None

    spec = pytree.tree_map(dimensions, (model.traced.args, model.traced.kwargs), (one.args, one.kwargs))
    bound = inspect.signature(model.module.forward).bind(*spec[0], **spec[1])
    return dict(bound.arguments)


def _write_torch_export(exported: torch.export.ExportedProgram, model: Model, path: Path, facts: str) -> None:
    with path.open("wb") as file:
        torch.export.save(exported, file, extra_files={FACTS: facts})


def _load_torch_export(path: Path) -> Program:
    with path.open("rb") as file:
        module = torch.export.load(file).module()

    def run(call: Call) -> list[Any]:
        with torch.no_grad():
            return list(pytree.tree_leaves(module(*call.args, **call.kwargs)))

    return run


def _write_onnx(exported: torch.export.ExportedProgram, model: Model, path: Path, facts: str) -> None:
    inputs, outputs = model.traced.inputs, pytree.tree_leaves(model.traced.outputs)
    program = torch.onnx.export(
        exported,
        dynamic_shapes=_dynamic_shapes(model),
        input_names=["input"] if len(inputs) == 1 else None,
        output_names=["output"] if len(outputs) == 1 else None,
        verbose=False,
    )
    assert program is not None, "dynamo=True returns a program"
    program.model.metadata_props[FACTS] = facts
    program.save(path, external_data=False)


def _load_onnx(path: Path) -> Program:
    """Return a function that runs the file with ONNX Runtime or, if not installed, ONNX's reference."""
    try:
        import onnxruntime
    except ImportError:
        from onnx.reference import ReferenceEvaluator

        session: Any = ReferenceEvaluator(str(path))
        names = session.input_names
    else:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_inputs()]

    def run(call: Call) -> list[Any]:
        arrays = [value.numpy() for value in call.inputs if isinstance(value, Tensor)]
        outputs = session.run(None, dict(zip(names, arrays, strict=True)))
        return [torch.as_tensor(output) for output in outputs]

    return run


def _difference(model: Model, form: str, call: Call, results: list[Any]) -> float:
    """Return the largest difference of the outputs. Raises BadFileError if it is not a rounding error."""
    expected, results = _tensors(call.outputs), _tensors(results)
    size = len(call.inputs[0]) if isinstance(call.inputs[0], Tensor) else "?"
    shapes = [[tuple(output.shape) for output in outputs] for outputs in (results, expected)]
    if shapes[0] != shapes[1]:
        raise _mismatch(model, form, f"has outputs of shape {shapes[0]}, PyTorch of {shapes[1]}", size)
    largest = 0.0
    for index, (output, reference) in enumerate(zip(results, expected, strict=True)):
        values, wanted = output.double(), reference.double()
        difference = _largest((values - wanted).abs(), torch.isnan(values) & torch.isnan(wanted))
        if not difference <= _TOLERANCE * _scale(model, index):
            raise _mismatch(model, form, f"differs from PyTorch by up to {difference:.3g}", size)
        largest = max(largest, difference)
    return largest


def _scale(model: Model, index: int) -> float:
    """Return the largest absolute value of an output over all samples, as one sample's may be close to 0."""
    outputs = [_tensors(call.outputs)[index].double().abs() for call in model.compared]
    return max(_largest(output, torch.isnan(output)) for output in outputs)


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _largest(values: Tensor, ignored: Tensor) -> float:
    return float(values.masked_fill(ignored, 0.0).max()) if values.numel() else 0.0


def _mismatch(model: Model, form: str, problem: str, size: object) -> BadFileError:
    return BadFileError(
        f"{model.name}: the {form} program {problem} (batch of {size}), so no file was written; "
        "choose another --format, or export the weights alone: -o FILE.safetensors"
    )


def _shapes(model: Model) -> list[list[int | str]]:
    """Return the shape of each input, its batch dimension as ``batch``."""
    pairs = zip(model.traced.inputs, model.compared[0].inputs, strict=True)
    return [
        ["batch" if a != b else a for a, b in zip(two.shape, one.shape, strict=True)]
        for two, one in pairs
        if isinstance(two, Tensor)
    ]
