"""Rules on the names of parts (models, data sets, strategies, …) and on their keyword arguments.

Checks that ranks repeat, for files that were never validated here, are functions that return a ``Problem``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from hpc_train.errors import shortened
from hpc_train.experiment.config.fields import Arguments
from hpc_train.experiment.config.problems import KeyPath, Problem, split_at_colon, with_blank
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.synonyms import data_name, model_name, value_for
from hpc_train.experiment.data_facts.built_in import DATA_SETS, MODELS
from hpc_train.experiment.data_facts.by_name import data_facts, missing_root
from hpc_train.experiment.topology.degrees import AXES, problem_of_stages
from hpc_train.experiment.topology.strategy_traits import problems_of_arguments, taking, traits_of
from hpc_train.experiment.validate import model_facts
from hpc_train.experiment.validate.base import rule
from hpc_train.registry import is_factory, nearest, parts, split_name, unknown_part

#: Providers whose names need a part after the slash, with an example.
_MODEL_EXAMPLES = {provider: facts.example for provider, facts in MODELS.items() if facts.example}
#: Kind and provider → an example.
_EXAMPLES = {("model", provider): example for provider, example in _MODEL_EXAMPLES.items()} | {
    ("data", provider): facts.example for provider, facts in DATA_SETS.items() if facts.example
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
    spelling = {known.lower(): known for known in names}.get(name.lower())
    close = spelling or nearest(name, names) or nearest(name.lower(), names)
    example = _EXAMPLES.get((kind.split()[0], provider))
    otherwise = f"{example}, or another" if example else "one"
    remedy = f"did you mean {provider}/{close}?" if close else f"write {otherwise} that {provider} lists"
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
        yield _unknown(("task",), "tasks", name)


def _unknown(path: KeyPath, kind: str, name: str) -> Problem:
    """Return the problem with a name that no part has, with the name here if other tools call it so."""
    message, remedy = unknown_part(kind, name)
    meant = value_for(path, name)
    return Problem(path, message, f"write {meant}" if meant in parts(kind) else remedy)


@rule("parallel.unknown-strategy", "parallel.strategy")
def strategy_is_known(experiment: Experiment) -> Iterator[Problem]:
    """``parallel.strategy`` must name a strategy."""
    name = experiment.parallel.strategy
    if name not in parts("strategies"):
        yield _unknown(("parallel", "strategy"), "strategies", name)


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
        message = unknown_part("models", provider)[0] if rest else f"'{shortened(name)}' names no provider"
        yield Problem(("model", "name"), message, f"write {shortened(model_name(name) or f'timm/{name}')}")
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
        message, remedy = unknown_part("datasets", provider)
        meant = data_name(name)
        yield Problem(path, message, f"write {shortened(meant)}" if meant else remedy)
    elif (example := data_facts(name).example) and not rest:
        yield Problem(path, f"'{shortened(name)}' names no data set", f"write {example}")
    elif example == "" and (problem := rest_not_taken(path, name)):
        yield problem


@rule("data.root-missing", "data.name", "data.root")
def data_on_disk_have_a_root(experiment: Experiment) -> Problem | None:
    """Data sets that are read from disk need ``data.root``."""
    return missing_root(experiment.data)


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
    """A provider that lists its models must have this one."""
    provider, rest = split_name(experiment.model.name)
    if provider in _MODEL_EXAMPLES and rest and not is_factory(experiment.model.name):
        # A tag after the dot selects the weights, not the model.
        base, names = rest.partition(".")[0], model_facts.known_names(provider)
        if names is not None and base not in names:
            others = [other for other in _MODEL_EXAMPLES if base in (model_facts.known_names(other) or ())]
            problem = unlisted(("model", "name"), provider, "model", base, names)
            yield replace(problem, remedy=f"did you mean {others[0]}/{base}?") if others else problem
    head, _, factory = experiment.model.name.partition(":")
    if head in _MODEL_EXAMPLES and factory in (model_facts.known_names(head) or ()):
        message = f"{head} has no factory '{shortened(factory)}', it is a name of a model"
        yield Problem(("model", "name"), message, f"write {head}/{shortened(factory)}")


@rule("data.unknown", "data.name", looks_up_names=True)
def dataset_is_known(experiment: Experiment) -> Iterator[Problem]:
    """torchvision must know the data set."""
    provider, rest = split_name(experiment.data.name)
    if data_facts(experiment.data.name).is_listed and rest:
        names = model_facts.known_names("datasets")
        if names is not None and rest not in names:
            yield unlisted(("data", "name"), provider, "data set for this", rest, names)
