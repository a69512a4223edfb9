"""Rules on names of parts (models, data sets, strategies, …) and on their keyword arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hpc_train.config import names
from hpc_train.config.degrees import DEGREES, SHARING_LAYERS
from hpc_train.config.pipelines import BY_STAGES, problem_of_stages
from hpc_train.config.problems import KeyPath, Problem, Rule, rule, shortened, shown
from hpc_train.config.schema import Experiment
from hpc_train.registry import is_factory, nearest, parts, split_name

#: Providers whose names say more behind the slash, with an example.
_MODEL_EXAMPLES = {"timm": "timm/resnet50", "torchvision": "torchvision/resnet50"}
_DATASET_EXAMPLES = {"torchvision": "torchvision/CIFAR10"}
_BARE_DATASETS = ("imagefolder", "digits", "synthetic", "text")
#: The classes of torch.optim, in lower case, but the unusable ones. A test compares.
TORCH_OPTIMIZERS = (
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "muon", "nadam", "radam",
    "rmsprop", "rprop", "sgd",
)  # fmt: skip
_NO_CHECKPOINT = "keeps lists of tensors and a random stream of its own, which a checkpoint can't hold"
#: Optimizers of torch and timm that no run can use → why not, and what to write instead.
UNUSABLE_OPTIMIZERS = {
    "adahessian": ("needs second derivatives, which backward here does not keep", "write adamw"),
    "kron": (_NO_CHECKPOINT, "write adamw"),
    "kronc": (_NO_CHECKPOINT, "write adamw"),
    "kronw": (_NO_CHECKPOINT, "write adamw"),
    "lbfgs": ("evaluates the loss again within a step, which is not done here", "write sgd or adamw"),
    "sparseadam": ("takes sparse gradients only, and models here give dense ones", "write adam"),
}
#: Those of ``engine.schedules`` that need no provider. A test compares.
SCHEDULES = ("constant", "cosine", "exponential", "linear", "multistep", "poly", "step")
#: What ``parallel.args`` may hold, by strategy, true or false each; a plug-in's may hold anything.
_STRATEGY_ARGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("fsdp", "hsdp", "zero2", *SHARING_LAYERS), ()),
    **dict.fromkeys(("ddp", "zero1"), ("find_unused_parameters",)),
}
#: Data sets that take no folder.
_ROOTLESS = ("torchvision/FakeData",)
#: Section of ``args`` → argument → what to write instead.
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
        "transform": "data.augment",
        "target_transform": "data.augment",
        "transforms": "data.augment",
    },
}


def _unknown_part(path: KeyPath, what: str, name: str, known: Iterable[str]) -> Problem:
    choices = sorted(known)
    close = nearest(name, choices)
    remedy = f"did you mean {close}?" if close else f"write one of {', '.join(choices)}"
    return Problem(path, f"there is no {what} '{shortened(name)}'", remedy)


@rule("task")
def task_is_known(experiment: Experiment) -> Iterator[Problem]:
    if experiment.task not in parts("tasks"):
        yield _unknown_part(("task",), "task", experiment.task, parts("tasks"))


@rule("parallel.strategy")
def strategy_is_known(experiment: Experiment) -> Iterator[Problem]:
    known = parts("strategies")
    if experiment.parallel.strategy not in known:
        yield _unknown_part(("parallel", "strategy"), "strategy", experiment.parallel.strategy, known)


@rule("logging.loggers")
def loggers_are_known(experiment: Experiment) -> Iterator[Problem]:
    for name in experiment.logging.loggers:
        path = ("logging", "loggers", name)
        if name == "wandb":
            remedy = "write logging.wandb: {project: …}"
            yield Problem(path, "wandb has a key of its own", remedy, on_key=True)
        elif name not in parts("loggers"):
            known = parts("loggers").keys() - {"wandb"}
            close = nearest(name, known)
            remedy = f"did you mean {close}?" if close else "install its package, or take it out"
            yield Problem(path, f"there is no logger '{shortened(name)}'", remedy, on_key=True)


@rule("model.name")
def model_provider_is_known(experiment: Experiment) -> Iterator[Problem]:
    name = experiment.model.name
    provider, rest = split_name(name)
    if is_factory(name):
        return
    if provider not in parts("models"):
        remedy = f"write timm/{shortened(name)} or another of {', '.join(sorted(parts('models')))}"
        if rest:
            yield _unknown_part(("model", "name"), "provider of models", provider, parts("models"))
        else:
            yield Problem(("model", "name"), f"'{shortened(name)}' names no provider", remedy)
    elif provider in _MODEL_EXAMPLES and not rest:
        example = _MODEL_EXAMPLES[provider]
        yield Problem(("model", "name"), f"'{shortened(name)}' names no model", f"write {example}")


@rule("data.name")
def dataset_provider_is_known(experiment: Experiment) -> Iterator[Problem]:
    name, path = experiment.data.name, ("data", "name")
    provider, rest = split_name(name)
    if is_factory(name):
        return
    if provider not in parts("datasets"):
        yield _unknown_part(path, "data set or provider", provider, parts("datasets"))
    elif provider in _DATASET_EXAMPLES and not rest:
        example = _DATASET_EXAMPLES[provider]
        yield Problem(path, f"'{shortened(name)}' names no data set", f"write {example}")
    elif provider in _BARE_DATASETS and "/" in name:
        yield Problem(path, f"{provider} takes nothing behind it", f"write {provider}")


@rule("data.name", "data.root")
def data_on_disk_have_a_root(experiment: Experiment) -> Iterator[Problem]:
    name = experiment.data.name
    needs_root = split_name(name)[0] in {"imagefolder", "text", "torchvision"} and name not in _ROOTLESS
    if needs_root and not is_factory(name) and experiment.data.root is None:
        yield Problem(("data", "root"), f"is missing, and {shortened(name)} needs it", "write root: data/…")


@rule("model.args", "data.args", "optimization.optimizer.args")
def arguments_say_nothing_twice(experiment: Experiment) -> Iterator[Problem]:
    given = {
        ("optimization", "optimizer", "args"): experiment.optimization.optimizer.args,
        ("model", "args"): experiment.model.args,
        ("data", "args"): experiment.data.args,
    }
    for path, arguments in given.items():
        for argument in arguments:
            key = (*path, argument)
            if argument in _SAID_ELSEWHERE[path]:
                remedy = f"write {_SAID_ELSEWHERE[path][argument]}"
                yield Problem(key, "may not stand here", remedy, on_key=True)
            elif not argument.isidentifier():
                yield Problem(key, "is no name of an argument", "write a Python name", on_key=True)


@rule("parallel")
def strategy_takes_its_arguments(experiment: Experiment) -> Iterator[Problem]:
    parallel = experiment.parallel
    if parallel.strategy not in _STRATEGY_ARGS:
        return
    taken = _STRATEGY_ARGS[parallel.strategy]
    for argument in parallel.args:
        if argument not in taken:
            remedy = f"write {' or '.join(taken)}, or take it out" if taken else "take it out"
            message = f"means nothing to strategy {parallel.strategy}"
            yield Problem(("parallel", "args", argument), message, remedy, on_key=True)
        elif not isinstance(parallel.args[argument], bool):
            message = f"needs true or false, got {shown(parallel.args[argument])}"
            yield Problem(("parallel", "args", argument), message, "write one of them, without quotes")


@rule("parallel")
def degrees_belong_to_the_strategy(experiment: Experiment) -> Iterator[Problem]:
    parallel = experiment.parallel
    if parallel.strategy not in parts("strategies"):
        return
    is_plugin = parallel.strategy not in _STRATEGY_ARGS
    for key, strategies in DEGREES.items():
        degree = getattr(parallel, key)
        if degree not in {None, 1} and parallel.strategy not in strategies:
            belongs = f"it belongs to {', '.join(strategies)}"
            owner = "what it takes stands in parallel.args" if is_plugin else belongs
            remedy = f"take it out; {owner}"
            message = f"{degree} means nothing to strategy {parallel.strategy}"
            yield Problem(("parallel", key), message, remedy)


@rule("parallel")
def schedules_belong_to_pipelines(experiment: Experiment) -> Iterator[Problem]:
    parallel = experiment.parallel
    if parallel.strategy not in _STRATEGY_ARGS:
        return
    written = []
    if parallel.strategy != "pipeline" and parallel.schedule != "1f1b":
        written.append("schedule")
    if parallel.strategy not in BY_STAGES and (parallel.stages_per_rank or 1) > 1:
        written.append("stages_per_rank")
    for key in written:
        message = f"{getattr(parallel, key)} means nothing to strategy {parallel.strategy}"
        yield Problem(("parallel", key), message, "take it out; it belongs to pipeline")
    if problem := problem_of_stages(parallel):
        yield problem


@rule("model.name")
def model_is_known(experiment: Experiment) -> Iterator[Problem]:
    provider, rest = split_name(experiment.model.name)
    if provider in _MODEL_EXAMPLES and rest and not is_factory(experiment.model.name):
        # A tag behind the dot says which weights, not which model.
        yield from _unlisted(("model", "name"), provider, "model", rest.partition(".")[0], provider)


@rule("optimization.optimizer.name")
def optimizer_is_known(experiment: Experiment) -> Iterator[Problem]:
    name = experiment.optimization.optimizer.name
    path = ("optimization", "optimizer", "name")
    provider, _, rest = name.lower().rpartition("/")
    if provider in {"", "torch", "timm"} and rest in UNUSABLE_OPTIMIZERS:
        why, remedy = UNUSABLE_OPTIMIZERS[rest]
        yield Problem(path, f"{name} {why}", remedy)
        return
    known = [*TORCH_OPTIMIZERS] if provider in {"", "torch"} else []
    if rest not in known and provider in {"", "timm"}:
        of_timm = names.known_names("timm_optimizers")
        if of_timm is None:
            return
        known += [of for of in of_timm if of not in UNUSABLE_OPTIMIZERS]
    if rest not in known:
        close = nearest(rest, known)
        remedy = f"did you mean {close}?" if close else "write one of torch.optim or timm.optim, like adamw"
        yield Problem(path, f"there is no optimizer '{shortened(name)}'", remedy)


@rule("optimization.schedule.name")
def schedule_is_known(experiment: Experiment) -> Iterator[Problem]:
    name, path = experiment.optimization.schedule.name, ("optimization", "schedule", "name")
    provider, _, rest = name.rpartition("/")
    if not provider and name not in SCHEDULES:
        yield _unknown_part(path, "schedule", name, SCHEDULES)
    elif provider and provider not in {"timm", "torch"}:
        remedy = "write timm/<name> or torch/<class>, like torch/OneCycleLR"
        yield Problem(path, f"there is no provider of schedules '{shortened(provider)}'", remedy)
    elif provider == "torch":
        known = names.known_names("torch_schedules")
        if known is not None and rest not in known:
            close = nearest(rest, known)
            remedy = f"did you mean torch/{close}?" if close else "write a class of torch.optim.lr_scheduler"
            yield Problem(path, f"torch has no schedule '{shortened(rest)}'", remedy)


@rule("data.name")
def dataset_is_known(experiment: Experiment) -> Iterator[Problem]:
    provider, rest = split_name(experiment.data.name)
    if provider == "torchvision" and rest and not is_factory(experiment.data.name):
        yield from _unlisted(("data", "name"), provider, "data set for this", rest, "datasets")


def _unlisted(path: KeyPath, provider: str, what: str, name: str, kind: str) -> Iterator[Problem]:
    known = names.known_names(kind)
    if known is None or name in known:
        return
    close = nearest(name, known) or nearest(name.lower(), known)
    remedy = f"did you mean {provider}/{close}?" if close else f"write one that {provider} lists"
    yield Problem(path, f"{provider} has no {what} '{shortened(name)}'", remedy)


RULES: tuple[Rule, ...] = (
    task_is_known,
    strategy_is_known,
    loggers_are_known,
    model_provider_is_known,
    dataset_provider_is_known,
    data_on_disk_have_a_root,
    arguments_say_nothing_twice,
    strategy_takes_its_arguments,
    degrees_belong_to_the_strategy,
    schedules_belong_to_pipelines,
)
#: Those that may start a child process.
NAME_RULES: tuple[Rule, ...] = (
    model_is_known,
    dataset_is_known,
    optimizer_is_known,
    schedule_is_known,
)
