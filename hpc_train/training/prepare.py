"""``hpc-train prepare``: fetches data and weights on a machine with network access, reads samples as training
does, and runs the model and the task on some of them.

Runs in a separate process, ``python -m hpc_train.training.prepare FILE [--no-forward] [--json]
[KEY=VALUE…]``, since commands import no torch. A step on a few samples on the CPU finds errors that nothing
else shows: shapes, dtypes, an optimizer that does not fit the model, and mistakes in the user's own code.

The size of a model's weights is measured without allocating them: on a login node the kernel overcommits
memory and later kills a process, not always the one that allocated it.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import nn

from hpc_train.console import say, say_text
from hpc_train.errors import BadFileError, ExitCode, UserError
from hpc_train.experiment.config.schema import Experiment, as_training
from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.experiment.data_facts.by_name import target_of, task_facts, training_samples
from hpc_train.experiment.plan.prediction import step_settings
from hpc_train.experiment.plan.sweep import expand
from hpc_train.experiment.topology.batch_arithmetic import BatchArithmetic, too_few_samples
from hpc_train.experiment.validate.loading import load as load_file
from hpc_train.run.tracebacks import shortened_traceback, users_traceback
from hpc_train.training import model_selection, rank_exit, trial_step
from hpc_train.training.datasets.base import DataSource
from hpc_train.training.datasets.batches import try_samples
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.normalize import Normalize
from hpc_train.training.datasets.notices import batch_notices, data_notices
from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.distributed.forking import ForkedCall
from hpc_train.training.models.building import build_model
from hpc_train.training.models.preprocessing import normalized_otherwise, with_preprocessing
from hpc_train.training.optimization import make_schedule
from hpc_train.training.tasks.base import Task, make_task, target_spec
from hpc_train.training.train_state import TrainState, assemble, load_initial_weights

#: Option of this module and of ``hpc-train prepare``.
NO_FORWARD = "--no-forward"
#: Print the results as JSON, in the last line of stdout.
AS_JSON = "--json"
#: Time limit of the search for classes that are not in the first training masks (assumed).
_MORE_MASKS_S = 5.0
#: Checks that are skipped if the model is not built or not run.
_LEFT, _UNCHECKED = "unchecked until the ranks start", "shapes, dtypes, loss and metrics"
#: The user's own model may read a file of weights in this time. Assumed.
_LIMIT_S = 120.0


@dataclass
class PreparedData:
    """Data that is complete here."""

    name: str
    root: str | None
    train_samples: int
    val_samples: int
    classes: int
    #: Tried samples that can't be read; another sample will replace each.
    bad_samples: list[str] = field(default_factory=list)
    #: Files that are not read, and conversions that lose information.
    notices: list[str] = field(default_factory=list)


@dataclass
class PreparedModel:
    """A model whose weights are here, tried on samples of the data of that name."""

    name: str
    task: str
    data: str
    #: Null if the model was not built.
    parameters: int | None = None
    trained_parameters: int | None = None
    weights: str | None = None
    #: Why it was not built, or not run on samples; None if it was.
    unchecked: str | None = None


@dataclass
class Prepared:
    """The data and models of the runs of a file, each once."""

    data: list[PreparedData] = field(default_factory=list)
    models: list[PreparedModel] = field(default_factory=list)


def prepare(experiments: Sequence[Experiment], *, runs_forward: bool = True) -> Prepared:
    """Build the data and the model of each experiment once, fetching missing files, and try both.

    ``runs_forward``: also run the model and the task on some samples.
    """
    prepared = Prepared()
    sources: dict[str, tuple[DataSource, PreparedData]] = {}
    models: dict[tuple[str, str, str], PreparedModel] = {}
    done: set[tuple[str, str]] = set()
    for planned in experiments:
        experiment = with_preprocessing(planned, download=True)
        data, model = experiment.data.model_dump_json(), experiment.model.model_dump_json()
        if data not in sources:
            sources[data] = _fetch_data(experiment)
            prepared.data.append(sources[data][1])
        source, facts = sources[data]
        arithmetic = _arithmetic(experiment, source)
        if (settings := (data, step_settings(experiment))) in done:
            continue
        done.add(settings)
        model_selection.refuse_no_evaluations(experiment, source)
        with _building("task", experiment.task):
            task = make_task(experiment, source.info)
        batches, bad = _try_data(experiment, source, task)
        facts.bad_samples += [sample for sample in bad if sample not in facts.bad_samples]
        unnormalized = batch_notices(batches, source.info, experiment.data)
        for notice in (*unnormalized, normalized_otherwise(experiment, source.info)):
            if notice is not None and notice not in facts.notices:
                facts.notices.append(notice)
                say(notice)
        tried = PreparedModel(experiment.model.name, experiment.task, experiment.data.name)
        if (key := (data, model, experiment.task)) not in models:
            models[key] = tried
            prepared.models.append(tried)
        state = _fetch_model(experiment, source.info, arithmetic, tried, is_new=tried is models[key])
        if state is not None:
            _try_model(experiment, source.info, state, task, batches, tried, runs_forward=runs_forward)
            models[key].unchecked = models[key].unchecked or tried.unchecked
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
        f"data {config.name}{where}: {facts.train_samples} training and "
        f"{facts.val_samples or 'no'} validation samples{described_target(experiment, source.info)}"
    )
    for notice in facts.notices:
        say(notice)
    return source, facts


def described_target(experiment: Experiment, info: DataInfo) -> str:
    """Return the kind of the samples' targets in the words of the task, to append to their number."""
    targets = (target_of(experiment.data), *task_facts(experiment.task).targets)
    target = next(filter(None, targets), None)
    count = info.num_classes
    classes = "1 class" if count == 1 else f"{count} classes"
    match target:
        case "number":
            return ", each with a number to predict"
        case "next tokens":
            return f" of {info.sequence_length} tokens, from a vocabulary of {count}"
        case "classes":
            return f", any of {classes} per sample"
        case "mask":
            return f", with masks of {classes}"
        case "boxes":
            return f", with boxes of {classes}"
    return f", {classes}"


def _try_data(experiment: Experiment, source: DataSource, task: Task) -> tuple[list[Batch], list[str]]:
    """Read some samples of each split as ranks do, for the task; return the batches and the bad samples.

    Raises the same errors as training.
    """
    batches, bad = try_samples(source, experiment, target_spec(task))
    Normalize(source.info, experiment.data)(batches[0].inputs)
    for sample in bad:
        say(f"data: can't be used, another sample will replace it: {sample}")
    return batches, list(map(str, bad))


def _arithmetic(experiment: Experiment, source: DataSource) -> BatchArithmetic:
    """Return the numbers of steps of the run. Raises BadFileError if they or the schedule are not valid."""
    planned, actual = training_samples(experiment.data), len(source.train)
    if planned is not None and planned != actual:
        say(
            f"data.name: {experiment.data.name} has {actual} training samples, but plan computes steps per "
            f"epoch from the {planned} of its DataFacts; fix num_samples there (training uses {actual})"
        )
    sizes = experiment.optimization.global_batch_size, experiment.optimization.micro_batch_size
    if problem := too_few_samples(*sizes, actual):
        raise problem.as_error()
    optimization = experiment.with_micro_batch_size(trial_step.num_samples(experiment)).optimization
    arithmetic = BatchArithmetic.of(optimization, actual, 1)
    make_schedule(optimization.schedule, arithmetic.total_steps, arithmetic.steps_per_epoch)
    return arithmetic


def _fetch_model(
    experiment: Experiment, info: DataInfo, arithmetic: BatchArithmetic, tried: PreparedModel, *, is_new: bool
) -> TrainState | None:
    """Build the model and its optimizer; return None, after a message, if there is too little memory here.

    ``is_new``: False if only the settings of its step differ from those before. Raises UserError if weights
    can't be fetched for lack of memory.
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
    load_initial_weights(model, config, info)
    state = assemble(model, trial_step.on_one_rank(experiment), arithmetic, trial_step.ONE_RANK)
    model, report = state.model, state.pretrained
    weights = "random weights" if config.pretrained is False else "pretrained weights at hand"
    tried.weights = weights if report is None else report.line()
    total = tried.parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    tried.trained_parameters = trained
    size = f"{total} parameters" + (f" ({trained} trained)" if trained < total else "")
    if is_new:
        say(f"model {config.name}: {size}, {tried.weights}")
    return state


def _built(config: ModelConfig, info: DataInfo) -> tuple[nn.Module | None, str | None]:
    """Return the model, or why this machine's memory is too small for it."""
    nbytes = planned_weight_bytes(config, info)
    if nbytes is not None and (why := trial_step.lacking_memory(nbytes)):
        return None, why
    # Without a known size, a limit keeps the kernel from killing this or another process.
    limit = trial_step.limited_to_free_memory() if nbytes is None else nullcontext()
    try:
        with _building("model.name", config.name), limit:
            return build_model(config, info, download=True), None
    except BadFileError as error:
        if rank_exit.out_of_memory(error) is None:
            raise
        return None, trial_step.MEMORY_RAN_OUT


def _try_model(
    experiment: Experiment,
    info: DataInfo,
    state: TrainState,
    task: Task,
    batches: Sequence[Batch],
    tried: PreparedModel,
    *,
    runs_forward: bool,
) -> None:
    if not runs_forward:
        tried.unchecked = NO_FORWARD
        return
    name, optimizer = experiment.model.name, experiment.optimization.optimizer.name
    then = " and an evaluation" if len(batches) > 1 else ""
    say(f"model {name}: trying a step of {optimizer}{then} on the CPU ({NO_FORWARD} skips this)")
    if why := trial_step.Trial(experiment, info, state, task).run(batches):
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
    place: Callable[[str], str] = str
    try:
        file, *overrides = (argument for argument in arguments if argument not in {NO_FORWARD, AS_JSON})
        loaded = load_file(Path(file), overrides)
        place = loaded.source.placed
        experiments = [as_training(variant.experiment) for variant in expand(loaded)]
        prepared = prepare(experiments, runs_forward=NO_FORWARD not in arguments)
        if AS_JSON in arguments:
            print(json.dumps(asdict(prepared)), flush=True)
    except UserError as error:
        say_text("\n".join(map(place, str(error).split("\n"))))
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


def planned_weight_bytes(config: ModelConfig, info: DataInfo) -> int | None:
    """Return the size of the model's weights, built on the meta device; None if it can't be built there.

    Runs in a forked child limited to the free memory, since the user's code may read a file of weights.
    """

    def measured() -> int:
        with trial_step.limited_to_free_memory(), torch.device("meta"):
            return trial_step.weight_bytes(build_model(config.model_copy(update={"pretrained": False}), info))

    call = ForkedCall(measured)
    try:
        return cast("int | None", call.result()) if call.has_ended(_LIMIT_S) else None
    finally:
        call.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
