"""``hpc-train prepare``: fetches data and weights on a machine with network access, reads samples as training
does, and runs the model and the task on some of them.

Runs in a separate process, ``python -m hpc_train.training.prepare FILE [--no-forward] [--json]
[KEY=VALUE…]``, since commands import no torch. The forward pass of a few samples on the CPU finds errors that
nothing else shows: shapes, dtypes and mistakes in the user's own code.

The size of a model's weights is measured without allocating them: on a login node the kernel overcommits
memory and later kills a process, not always the one that allocated it.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from hpc_train.console import say, say_text
from hpc_train.errors import BadFileError, ExitCode, UserError
from hpc_train.experiment.config.schema import Experiment, as_training
from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.experiment.data_facts.by_name import training_samples
from hpc_train.experiment.plan.sweep import expand
from hpc_train.experiment.topology.batch_arithmetic import too_few_samples
from hpc_train.experiment.validate.loading import load as load_file
from hpc_train.run.resource_limits import cgroup_folders, of_process
from hpc_train.run.tracebacks import shortened_traceback, users_traceback
from hpc_train.training.datasets.base import DataSource
from hpc_train.training.datasets.batches import try_samples
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.normalize import Normalize
from hpc_train.training.datasets.notices import data_notices
from hpc_train.training.datasets.structures import map_tensors
from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.distributed.forking import ForkedCall
from hpc_train.training.evaluation import without_dimensions
from hpc_train.training.model_selection import check_metrics, refuse_no_evaluations
from hpc_train.training.models.building import build_model
from hpc_train.training.models.fine_tuning import prepare_for_training
from hpc_train.training.models.preprocessing import with_preprocessing
from hpc_train.training.models.weights import report_of
from hpc_train.training.optimization import matched_groups
from hpc_train.training.rank_exit import out_of_memory
from hpc_train.training.tasks.base import (
    Task,
    make_task,
    mean_loss,
    optional_metrics,
    target_spec,
    total_weight,
    weighs_batches,
)
from hpc_train.training.train_state import load_initial_weights

#: Option of this module and of ``hpc-train prepare``.
NO_FORWARD = "--no-forward"
#: Print the results as JSON, in the last line of stdout.
AS_JSON = "--json"
#: Time limit of the search for classes that are not in the first training masks (assumed).
_MORE_MASKS_S = 5.0
#: Checks that are skipped if the model is not built or not run.
_LEFT, _UNCHECKED = "unchecked until the ranks start", "shapes, dtypes, loss and metrics"
#: BatchNorm needs two samples.
_SAMPLES = 2
#: Why a model can't be built or run if its size was not known before.
MEMORY_RAN_OUT = "the memory that is free here does not suffice"
#: The user's own model may read a file of weights in this time. Assumed.
_LIMIT_S = 120.0
_GB = 1e9
#: A cgroup's limit, its usage, and the line of memory.stat with reclaimable memory; by version.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass
class PreparedData:
    """Data that is complete here: an entry of ``data`` of ``prepare --json``."""

    name: str
    root: str | None
    train_samples: int
    #: 0 if there are none.
    val_samples: int
    classes: int
    bad_samples: list[str] = field(default_factory=list)
    #: Files that are not read, and conversions that lose information.
    notices: list[str] = field(default_factory=list)


@dataclass
class PreparedModel:
    """A model that was built and tried: an entry of ``models``. Fields are None if it was not built."""

    name: str
    task: str
    data: str
    parameters: int | None = None
    trained_parameters: int | None = None
    weights: str | None = None
    #: Why it was not built, or not run on samples.
    unchecked: str | None = None


@dataclass
class Prepared:
    """The data and models that the runs of a file need, each once."""

    data: list[PreparedData] = field(default_factory=list)
    models: list[PreparedModel] = field(default_factory=list)


def prepare(experiments: Sequence[Experiment], *, runs_forward: bool = True) -> Prepared:
    """Build the data and the model of each experiment once, fetching missing files, and try both.

    ``runs_forward``: also run the model and the task on some samples.
    """
    prepared = Prepared()
    sources: dict[str, tuple[DataSource, PreparedData]] = {}
    done: set[tuple[str, str, str]] = set()
    for planned in experiments:
        experiment = with_preprocessing(planned, download=True)
        data, model = experiment.data.model_dump_json(), experiment.model.model_dump_json()
        if data not in sources:
            sources[data] = _fetch_data(experiment)
            prepared.data.append(sources[data][1])
        source, facts = sources[data]
        _check_number_of_samples(experiment, source)
        if (data, model, experiment.task) in done:
            continue
        done.add((data, model, experiment.task))
        refuse_no_evaluations(experiment, source)
        with _building("task", experiment.task):
            task = make_task(experiment, source.info)
        batches, bad = _try_data(experiment, source, task)
        facts.bad_samples += [sample for sample in bad if sample not in facts.bad_samples]
        tried = PreparedModel(experiment.model.name, experiment.task, experiment.data.name)
        prepared.models.append(tried)
        built = _fetch_model(experiment, source.info, tried)
        if built is not None:
            _try_model(experiment, source.info, built, task, batches, tried, runs_forward=runs_forward)
    return prepared


def _fetch_data(experiment: Experiment) -> tuple[DataSource, PreparedData]:
    config = experiment.data
    with _building("data.name", config.name):
        source = build_source(config, download=True)
        facts = PreparedData(
            config.name,
            config.root,
            len(source.train),
            0 if source.val is None else len(source.val),
            source.info.num_classes,
            notices=data_notices(source, config, more_masks_s=_MORE_MASKS_S),
        )
    where = f" in {config.root}" if config.root else ""
    say(
        f"data {config.name}{where}: {facts.train_samples} training and {facts.val_samples} validation "
        f"samples, {facts.classes} classes"
    )
    for notice in facts.notices:
        say(notice)
    return source, facts


def _try_data(experiment: Experiment, source: DataSource, task: Task) -> tuple[list[Batch], list[str]]:
    """Read some samples of each split as ranks do, for the task; return the batches and the bad samples.

    Raises the same errors as training.
    """
    batches, bad = try_samples(source, experiment, target_spec(task))
    Normalize(source.info, experiment.data)(batches[0].inputs)
    for sample in bad:
        say(f"data: can't be used, another sample will replace it: {sample}")
    return batches, list(map(str, bad))


def _check_number_of_samples(experiment: Experiment, source: DataSource) -> None:
    planned, actual = training_samples(experiment.data), len(source.train)
    if planned is not None and planned != actual:
        say(
            f"data.name: {experiment.data.name} has {actual} training samples, but plan computes steps per "
            f"epoch from the {planned} of its DataFacts; fix num_samples there (training uses {actual})"
        )
    sizes = experiment.optimization.global_batch_size, experiment.optimization.micro_batch_size
    if problem := too_few_samples(*sizes, actual):
        raise problem.as_error()


def _fetch_model(experiment: Experiment, info: DataInfo, tried: PreparedModel) -> nn.Module | None:
    """Build the model; return None, after a message, if this machine has too little memory.

    Raises UserError if weights can't be fetched for that reason.
    """
    config = experiment.model
    model, why = _built(config, info)
    if why is not None and config.pretrained is True:
        raise UserError(
            f"model.pretrained: the weights of {config.name} are not fetched: {why}; "
            "run prepare on a machine with more memory"
        )
    if model is None:
        say(f"model {config.name}: not built: {why}; {_LEFT}: whether it can be built, {_UNCHECKED}")
        tried.unchecked = why
        return None
    load_initial_weights(model, config)
    prepare_for_training(model, config)
    matched_groups(experiment.optimization.optimizer, model)
    report = report_of(model)
    weights = "random weights" if config.pretrained is False else "pretrained weights at hand"
    tried.weights = weights if report is None else report.line()
    total = tried.parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    tried.trained_parameters = trained
    size = f"{total} parameters" + (f" ({trained} trained)" if trained < total else "")
    say(f"model {config.name}: {size}, {tried.weights}")
    return model


def _built(config: ModelConfig, info: DataInfo) -> tuple[nn.Module | None, str | None]:
    """Return the model, or why this machine's memory is too small for it."""
    nbytes = planned_weight_bytes(config, info)
    if nbytes is not None and (why := lacking_memory(nbytes)):
        return None, why
    # Without a known size, a limit keeps the kernel from killing this or another process.
    limit = limited_to_free_memory() if nbytes is None else nullcontext()
    try:
        with _building("model.name", config.name), limit:
            return build_model(config, info, download=True), None
    except BadFileError as error:
        if out_of_memory(error) is None:
            raise
        return None, MEMORY_RAN_OUT


def _try_model(
    experiment: Experiment,
    info: DataInfo,
    model: nn.Module,
    task: Task,
    batches: Sequence[Batch],
    tried: PreparedModel,
    *,
    runs_forward: bool,
) -> None:
    if not runs_forward:
        tried.unchecked = NO_FORWARD
        return
    name = experiment.model.name
    say(f"model {name}: computing loss and metrics of a few samples on the CPU ({NO_FORWARD} skips this)")
    if why := try_forward(experiment, info, model, task, batches):
        say(f"model {name}: not run on samples: {why}; {_LEFT}: {_UNCHECKED}")
        tried.unchecked = why


@contextmanager
def _building(key: str, name: str) -> Iterator[None]:
    """Convert errors of the part's code to BadFileError with the user's own frames.

    An OSError without user code in its traceback, such as no network, is not converted.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # from the part's code
        shown = users_traceback(error)
        if shown is None and isinstance(error, OSError):
            raise
        shown = shown or shortened_traceback(traceback.format_exc())
        raise BadFileError(f"{shown}\n{key}: {name} raised this while it was built; fix it there") from error


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    try:
        file, *overrides = (argument for argument in arguments if argument not in {NO_FORWARD, AS_JSON})
        loaded = load_file(Path(file), overrides)
        experiments = [as_training(variant.experiment) for variant in expand(loaded)]
        prepared = prepare(experiments, runs_forward=NO_FORWARD not in arguments)
        if AS_JSON in arguments:
            print(json.dumps(asdict(prepared)), flush=True)
    except UserError as error:
        say_text(str(error))
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except OSError as error:  # no network, no space
        say(str(error))
        return int(ExitCode.IO)
    except Exception as error:  # from the user's code in one of the parts
        shown = users_traceback(error)
        if shown is None:
            raise
        say_text(f"{shown}\nprepare: your code raised this; fix it there")
        return int(ExitCode.BAD_FILE)
    return int(ExitCode.DONE)


def try_forward(
    experiment: Experiment, info: DataInfo, model: nn.Module, task: Task, batches: Sequence[Batch]
) -> str | None:
    """Compute the loss of training samples, then the sums of an evaluation, without gradients and in float32.

    ``batches``: a training batch and, if there is any, a validation batch. If this machine has too little
    memory, returns the reason. Raises BadFileError, with the user's own frames if there are any.
    """
    # Assumed: without gradients, the activations of two samples need no more memory than the weights.
    if why := lacking_memory(weight_bytes(model)):
        return why
    normalize = Normalize(info, experiment.data, channels_last=experiment.model.channels_last)
    for batch, is_training in zip(batches, (True, False), strict=False):
        few = batch.first(_num_samples(experiment))
        try:
            normalized = replace(few, inputs=normalize(few.inputs))
            metrics = _metrics_of(model, task, normalized, is_training=is_training)
        except UserError:
            raise
        except Exception as error:  # from the user's code
            if out_of_memory(error):
                return MEMORY_RAN_OUT
            raise _refusal(experiment, few, is_training=is_training) from error
        if metrics is not None:
            check_metrics(experiment, {*metrics, *optional_metrics(task)})
    return None


def _num_samples(experiment: Experiment) -> int:
    size = experiment.optimization.micro_batch_size
    # Synchronized BatchNorm counts the samples of all ranks.
    return _SAMPLES if size == "auto" or experiment.parallel.sync_batchnorm else min(_SAMPLES, size)


@torch.no_grad()
def _metrics_of(model: nn.Module, task: Task, batch: Batch, *, is_training: bool) -> dict[str, float] | None:
    """Return the metrics of an evaluation of ``batch``; None in training."""
    outputs = task.forward(model.train(is_training), batch)
    if is_training:
        if weighs_batches(task):
            total_weight(task, replace(batch, inputs=None))
        mean_loss(task, outputs, batch)
        return None
    sums = task.sums(outputs, batch)
    return task.metrics({name: without_dimensions(value) for name, value in sums.items()})


def _refusal(experiment: Experiment, batch: Batch, *, is_training: bool) -> BadFileError:
    shapes = map_tensors(lambda tensor: tuple(tensor.shape), batch.inputs)
    what = "loss of training" if is_training else "sums of validation"
    return BadFileError(
        f"{shortened_traceback(traceback.format_exc())}\n"
        f"model.name: {experiment.model.name} and task {experiment.task} can't compute the {what} samples of "
        f"{experiment.data.name} (inputs of shape {shapes}); fix the one that raised this, or write "
        "--no-forward if it only works on a GPU"
    )


def free_bytes() -> int:
    """Return the free memory of the machine, or of the tightest cgroup of this process."""
    machine = _number_in(Path("/proc/meminfo"), r"^MemAvailable:\s+(\d+) kB") or 0
    return max(0, min([machine * 1024, *_free_in_cgroups()]))


def _free_in_cgroups() -> Iterator[int]:
    for folder in cgroup_folders("memory"):
        for limit_name, use_name, reclaimed in _CGROUP_FILES:
            limit, use = (
                _number_in(folder / limit_name, r"^(\d+)$"),
                _number_in(folder / use_name, r"^(\d+)$"),
            )
            if limit is not None and use is not None:
                yield limit - use + (_number_in(folder / "memory.stat", rf"^{reclaimed} (\d+)$") or 0)


def _number_in(file: Path, pattern: str) -> int | None:
    try:
        match = re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return None if match is None else int(match[1])


@contextmanager
def limited_to_free_memory() -> Iterator[None]:
    """Limit this process's allocations within this context to the memory that is free now."""
    before, hard = of_process(resource.RLIMIT_DATA)
    in_use = (_number_in(Path("/proc/self/status"), r"^VmData:\s+(\d+) kB") or 0) * 1024
    limits = [limit for limit in (before, hard) if limit != resource.RLIM_INFINITY]
    _set_data_limit(min([in_use + free_bytes(), *limits]), hard)
    try:
        yield
    finally:
        _set_data_limit(before, hard)


def _set_data_limit(soft: int, hard: int) -> None:
    with suppress(OSError):  # a sandbox refuses it
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def lacking_memory(nbytes: int) -> str | None:
    """Return why weights of this size can't be used on this machine now; None if they can."""
    free = free_bytes()
    if nbytes <= free:
        return None
    return f"its weights have {nbytes / _GB:.1f} GB, and {free / _GB:.1f} GB of memory are free here"


def weight_bytes(model: nn.Module) -> int:
    """Return the size of parameters and buffers, on any device."""
    tensors: Iterable[Tensor] = (*model.parameters(), *model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def planned_weight_bytes(config: ModelConfig, info: DataInfo) -> int | None:
    """Return the size of the model's weights, built on the meta device; None if it can't be built there.

    Runs in a forked child limited to the free memory, since the user's code may read a file of weights.
    """
    call = ForkedCall(lambda: _measured_bytes(config, info))
    try:
        return cast("int | None", call.result()) if call.has_ended(_LIMIT_S) else None
    finally:
        call.close()


def _measured_bytes(config: ModelConfig, info: DataInfo) -> int:
    with limited_to_free_memory(), torch.device("meta"):
        return weight_bytes(build_model(config.model_copy(update={"pretrained": False}), info))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
