"""Rules on the names of parts (models, data sets, strategies, …) and on their keyword arguments.

Checks that ranks repeat, for files that were never validated here, are functions that return a ``Problem``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from hpc_train.errors import shortened
from hpc_train.experiment.config.fields import Arguments
from hpc_train.experiment.config.problems import KeyPath, Problem, split_at_colon, with_blank
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.data_facts.by_name import data_facts, missing_root
from hpc_train.experiment.topology.degrees import AXES
from hpc_train.experiment.topology.learning_rate import OVER_SPAN, OVER_STEPS
from hpc_train.experiment.topology.pipeline_schedules import problem_of_stages
from hpc_train.experiment.topology.strategy_traits import problems_of_arguments, taking, traits_of
from hpc_train.experiment.validate import model_facts
from hpc_train.experiment.validate.base import rule
from hpc_train.registry import is_factory, nearest, parts, split_name, unknown_name, unknown_part

#: Providers whose names need a part after the slash, with an example.
_MODEL_EXAMPLES = {"timm": "timm/resnet50", "torchvision": "torchvision/resnet50", "smp": "smp/unet"}
#: The classes of torch.optim, in lower case, except the unusable ones. Compared by a test.
TORCH_OPTIMIZERS = (
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "muon", "nadam", "radam",
    "rmsprop", "rprop", "sgd",
)  # fmt: skip
_NO_CHECKPOINT = "keeps lists of tensors and its own random generator, which a checkpoint can't save"
#: Optimizers of torch and timm that no run can use → the reason, and the remedy.
UNUSABLE_OPTIMIZERS = {
    "adahessian": ("needs second derivatives, which the backward pass does not retain", "write adamw"),
    "kron": (_NO_CHECKPOINT, "write adamw"),
    "kronc": (_NO_CHECKPOINT, "write adamw"),
    "kronw": (_NO_CHECKPOINT, "write adamw"),
    "lbfgs": ("evaluates the loss several times per step, which is not supported", "write sgd or adamw"),
    "sparseadam": ("supports sparse gradients only, and gradients are dense", "write adam"),
}
#: Data sets as people call them → torchvision's name.
_OF_TORCHVISION = {
    name.lower(): name
    for name in ("CIFAR10", "CIFAR100", "MNIST", "FashionMNIST", "SVHN", "STL10", "Food101", "Cityscapes")
}
#: Section of ``args`` → argument → the key to write instead.
_SAID_ELSEWHERE: dict[KeyPath, dict[str, str]] = {
    ("optimization", "optimizer", "args"): {
        "lr": "optimization.optimizer.lr",
        "momentum": "optimization.optimizer.momentum",
        "weight_decay": "optimization.optimizer.weight_decay",
    },
    ("model", "args"): {
        "pretrained": "model.pretrained",
        "checkpoint_path": "model.pretrained",
        "weights": "model.pretrained",
    },
    ("data", "args"): {
        "root": "data.root",
        "transform": "data.transform",
        "target_transform": "data.transform",
        "transforms": "data.transform",
    },
}


def unlisted(path: KeyPath, provider: str, kind: str, name: str, names: Collection[str]) -> Problem:
    """Return the problem with a name that the provider does not list."""
    close = nearest(name, names) or nearest(name.lower(), names)
    remedy = f"did you mean {provider}/{close}?" if close else f"write one that {provider} lists"
    return Problem(path, f"{provider} has no {kind} '{shortened(name)}'", remedy)


def rest_not_taken(path: KeyPath, name: str) -> Problem | None:
    """Return the problem with ``gpt/small``, of a provider that takes no name after it."""
    if "/" not in name:
        return None
    provider, _ = split_name(name)
    return Problem(path, f"{provider} takes no name after it", f"write {provider}")


def not_an_argument(section: KeyPath, argument: str, key: str) -> Problem:
    """Return the problem with an argument in ``args`` whose value belongs in another key."""
    return Problem((*section, argument), "is not allowed here", f"write {key}", on_key=True)


@rule("task.unknown", "task")
def task_is_known(experiment: Experiment) -> Iterator[Problem]:
    """``task`` must name a task, or a class of the user's."""
    name = experiment.task
    if not is_factory(name) and name not in parts("tasks"):
        yield Problem(("task",), *unknown_part("tasks", name))


@rule("parallel.unknown-strategy", "parallel.strategy")
def strategy_is_known(experiment: Experiment) -> Iterator[Problem]:
    """``parallel.strategy`` must name a strategy."""
    name = experiment.parallel.strategy
    if name not in parts("strategies"):
        yield Problem(("parallel", "strategy"), *unknown_part("strategies", name))


@rule("model.provider", "model.name")
def model_provider_is_known(experiment: Experiment) -> Iterator[Problem]:
    """``model.name`` must start with a provider of models, or name a factory."""
    name = experiment.model.name
    provider, rest = split_name(name)
    if is_factory(name):
        return
    if provider not in parts("models"):
        if problem := _dotted_part(name):
            yield Problem(("model", "name"), *problem)
            return
        remedy = f"write timm/{shortened(name)} or another of {', '.join(sorted(parts('models')))}"
        if rest:
            yield Problem(("model", "name"), *unknown_part("models", provider))
        else:
            yield Problem(("model", "name"), f"'{shortened(name)}' names no provider", remedy)
    elif provider in _MODEL_EXAMPLES and not rest:
        example = _MODEL_EXAMPLES[provider]
        yield Problem(("model", "name"), f"'{shortened(name)}' names no model", f"write {example}")


def _dotted_part(name: str) -> tuple[str, str] | None:
    """Return the problem with ``my_model.net`` or ``my_model.py``, and the remedy, if the file is here."""
    is_file = name.endswith(".py")
    path, _, attribute = name.rpartition(".")
    module = path.replace("/", ".")
    file = Path(f"{module.replace('.', '/')}.py")
    if not attribute.isidentifier() or not file.is_file():
        return None
    written = (
        f"{module}:NAME, with the name of a function or class in it" if is_file else f"{module}:{attribute}"
    )
    return f"'{shortened(name)}' has no colon between module and name", f"write {written}"


@rule("data.provider", "data.name")
def dataset_provider_is_known(experiment: Experiment) -> Iterator[Problem]:
    """``data.name`` must be a data set or start with a provider, or name a factory."""
    name, path = experiment.data.name, ("data", "name")
    provider, rest = split_name(name)
    if is_factory(name):
        return
    if provider not in parts("datasets"):
        if dotted := _dotted_part(name):
            yield Problem(path, *dotted)
            return
        spelling = _OF_TORCHVISION.get(name.lower().replace("-", ""))
        message, remedy = unknown_part("datasets", provider)
        yield Problem(path, message, f"write torchvision/{spelling}" if spelling else remedy)
    elif (example := data_facts(name).example) and not rest:
        yield Problem(path, f"'{shortened(name)}' names no data set", f"write {example}")
    elif example == "" and (problem := rest_not_taken(path, name)):
        yield problem


@rule("data.root-missing", "data.name", "data.root")
def data_on_disk_have_a_root(experiment: Experiment) -> Iterator[Problem]:
    """Data sets that are read from disk need ``data.root``."""
    if problem := missing_root(experiment.data):
        yield problem


@rule("arguments.key", "model.args", "data.args", "optimization.optimizer.args")
def arguments_say_nothing_twice(experiment: Experiment) -> Iterator[Problem]:
    """``args`` must have valid names only, and none that is a key of its own."""
    all_arguments = {
        ("optimization", "optimizer", "args"): experiment.optimization.optimizer.args,
        ("model", "args"): experiment.model.args,
        ("data", "args"): experiment.data.args,
    }
    for path, arguments in all_arguments.items():
        for argument in arguments:
            if key := _SAID_ELSEWHERE[path].get(argument):
                yield not_an_argument(path, argument, key)
            elif not argument.isidentifier():
                unspaced = split_at_colon(argument)
                remedy = with_blank(*unspaced) if unspaced else "write a Python name"
                yield Problem((*path, argument), "is not a valid argument name", remedy, on_key=True)


def own_arguments(path: KeyPath, args: Arguments) -> Arguments:
    """Return the arguments under ``path`` without those that ``arguments_say_nothing_twice`` refuses."""
    elsewhere = _SAID_ELSEWHERE[path]
    return {name: value for name, value in args.items() if name not in elsewhere and name.isidentifier()}


@rule("parallel.arguments", "parallel")
def strategy_takes_its_arguments(experiment: Experiment) -> Iterator[Problem]:
    """The strategy must know the keys of ``parallel.args``."""
    yield from problems_of_arguments(experiment.parallel.strategy, experiment.parallel.args)


@rule("parallel.degree", "parallel")
def degrees_belong_to_the_strategy(experiment: Experiment) -> Iterator[Problem]:
    """The strategy must take the degrees that are given."""
    parallel = experiment.parallel
    if parallel.strategy not in parts("strategies"):
        return
    traits = traits_of(parallel.strategy)
    for key in AXES:
        degree = getattr(parallel, key)
        if degree not in {None, 1} and key not in traits.degrees:
            belongs = f"it belongs to {', '.join(taking(key))}"
            owner = "its arguments are in parallel.args" if traits.arguments is None else belongs
            remedy = f"take it out; {owner}"
            message = f"{degree} does not apply to strategy {parallel.strategy}"
            yield Problem(("parallel", key), message, remedy)


@rule("parallel.schedule", "parallel")
def schedules_belong_to_pipelines(experiment: Experiment) -> Iterator[Problem]:
    """``parallel.schedule`` and ``stages_per_rank`` need a pipeline."""
    parallel = experiment.parallel
    traits = traits_of(parallel.strategy)
    if traits.arguments is None and not traits.has_stages:
        return
    written = []
    if not traits.has_schedule and parallel.schedule != "1f1b":
        written.append("schedule")
    if not traits.has_stages and (parallel.stages_per_rank or 1) > 1:
        written.append("stages_per_rank")
    for key in written:
        message = f"{getattr(parallel, key)} does not apply to strategy {parallel.strategy}"
        yield Problem(("parallel", key), message, "take it out; it belongs to pipeline")
    if problem := problem_of_stages(parallel):
        yield problem


@rule("model.unknown", "model.name", looks_up_names=True)
def model_is_known(experiment: Experiment) -> Iterator[Problem]:
    """timm, torchvision or smp must know the model."""
    provider, rest = split_name(experiment.model.name)
    if provider in _MODEL_EXAMPLES and rest and not is_factory(experiment.model.name):
        # A tag after the dot selects the weights, not the model.
        base, names = rest.partition(".")[0], model_facts.known_names(provider)
        if names is not None and base not in names:
            yield unlisted(("model", "name"), provider, "model", base, names)


@rule("optimizer.unknown", "optimization.optimizer.name", looks_up_names=True)
def optimizer_is_known(experiment: Experiment) -> Iterator[Problem]:
    """torch or timm must know the optimizer, and it must be supported."""
    name = experiment.optimization.optimizer.name
    if problem := problem_of_optimizer(name, lambda: model_facts.known_names("timm_optimizers")):
        yield problem


def problem_of_optimizer(name: str, of_timm: Callable[[], Collection[str] | None]) -> Problem | None:
    """Return the problem with the name. ``of_timm``: lists timm's; None: they are unknown here."""
    path = ("optimization", "optimizer", "name")
    provider, _, rest = name.lower().rpartition("/")
    if provider in {"", "torch", "timm"} and rest in UNUSABLE_OPTIMIZERS:
        why, remedy = UNUSABLE_OPTIMIZERS[rest]
        return Problem(path, f"{shortened(name)} {why}", remedy)
    names = [*TORCH_OPTIMIZERS] if provider in {"", "torch"} else []
    if rest not in names and provider in {"", "timm"}:
        listed = of_timm()
        if listed is None:
            return None
        names += [name_of_timm for name_of_timm in listed if name_of_timm not in UNUSABLE_OPTIMIZERS]
    if rest in names:
        return None
    close = nearest(rest, names)
    meant = f"{provider}/{close}" if provider else close
    remedy = f"did you mean {meant}?" if close else "write one of torch.optim or timm.optim, like adamw"
    return Problem(path, f"there is no optimizer '{shortened(name)}'", remedy)


@rule("optimizer.fused-sgd", "optimization.optimizer", "precision")
def fused_sgd_fits_the_precision(experiment: Experiment) -> Iterator[Problem]:
    """Fused SGD must not run under fp16's scaler."""
    optimizer = experiment.optimization.optimizer
    if experiment.precision == "fp16" and (problem := unfit_fused_sgd(optimizer.name, optimizer.args)):
        yield problem


def unfit_fused_sgd(name: str, args: Mapping[str, object]) -> Problem | None:
    """Return the problem with fused SGD if a scaler skips steps, or gradients are sparse."""
    if name.lower() not in {"sgd", "torch/sgd"} or not args.get("fused"):
        return None
    message = (
        "fused sgd is wrong under precision: fp16, whose scaler skips steps, and takes no sparse gradients"
    )
    return Problem(("optimization", "optimizer", "args", "fused"), message, "omit it")


@rule("schedule.unknown", "optimization.schedule.name", looks_up_names=True)
def schedule_is_known(experiment: Experiment) -> Iterator[Problem]:
    """The learning rate schedule must be built in."""
    if problem := problem_of_schedule_name(experiment.optimization.schedule.name):
        yield problem


def problem_of_schedule_name(name: str) -> Problem | None:
    """Return the problem with the name of a learning rate schedule, or None."""
    built_in = [*OVER_SPAN, *OVER_STEPS]
    if name in built_in:
        return None
    return Problem(("optimization", "schedule", "name"), *unknown_name("schedule", name, built_in))


@rule("data.unknown", "data.name", looks_up_names=True)
def dataset_is_known(experiment: Experiment) -> Iterator[Problem]:
    """torchvision must know the data set."""
    provider, rest = split_name(experiment.data.name)
    if data_facts(experiment.data.name).is_listed and rest:
        names = model_facts.known_names("datasets")
        if names is not None and rest not in names:
            yield unlisted(("data", "name"), provider, "data set for this", rest, names)
