"""Rules on ``smp/<architecture>``. ``models.segmentation_models`` raises the same problems."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from hpc_train.errors import shortened
from hpc_train.experiment.config.problems import KeyPath, Problem
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.validate import model_facts
from hpc_train.experiment.validate.base import rule
from hpc_train.experiment.validate.logging_rules import not_installed
from hpc_train.registry import is_factory, nearest, split_name

_ARGS: KeyPath = ("model", "args")
#: Starts the names of timm's encoders.
OF_TIMM = "tu-"
_OF_THE_DATA = "take it out; it follows from the data"
_OF_THE_TASK = "take it out; the task needs the logits of each pixel, and nothing else"
#: Arguments of the library's classes that no file can set → the remedy.
OWNED = {
    "encoder_weights": "write model.pretrained",
    "classes": _OF_THE_DATA,
    "in_channels": _OF_THE_DATA,
    "activation": _OF_THE_TASK,
    "aux_params": _OF_THE_TASK,
}


def is_smp(name: str) -> bool:
    """Return True if ``model.name`` is ``smp/<architecture>``."""
    return not is_factory(name) and split_name(name)[0] == "smp"


def owned_arguments(args: Mapping[str, object]) -> Iterator[Problem]:
    """Yield the problems of arguments that follow from other keys, from the data or from the task."""
    for name in args:
        if name in OWNED:
            yield Problem((*_ARGS, name), "is not allowed here", OWNED[name], on_key=True)


def encoder_problem(name: object, of_smp: Collection[str], of_timm: Collection[str]) -> Problem | None:
    """Return the problem with ``encoder_name``: neither one of the library's ``of_smp`` nor ``tu-`` and one
    ``of_timm``, with or without a tag.
    """
    path = (*_ARGS, "encoder_name")
    if not isinstance(name, str):
        return Problem(path, f"{shortened(repr(name))} is not a name", "write one, like resnet34")
    if name in of_smp:
        return None
    base = name.removeprefix(OF_TIMM).partition(".")[0]
    if name.startswith(OF_TIMM) and base in of_timm:
        return None
    # A timm encoder with a wrong or missing prefix is an exact match.
    close = f"{OF_TIMM}{base}" if base in of_timm else _nearest_encoder(name, base, of_smp, of_timm)
    remedy = f"did you mean {close}?" if close else f"write one like resnet34, or {OF_TIMM}<name of timm>"
    return Problem(path, f"smp has no encoder '{shortened(name)}'", remedy)


def _nearest_encoder(name: str, base: str, of_smp: Collection[str], of_timm: Collection[str]) -> str | None:
    if not name.startswith(OF_TIMM):
        return nearest(name, of_smp)
    close = nearest(base, of_timm)
    return f"{OF_TIMM}{close}" if close else None


@rule("model.smp-arguments", "model.name", "model.args")
def smp_owns_its_arguments(experiment: Experiment) -> Iterator[Problem]:
    """Classes, channels and weights of smp's models must not be in ``model.args``."""
    if is_smp(experiment.model.name):
        yield from owned_arguments(experiment.model.args)


@rule("task.smp", "model.name", "task")
def smp_models_are_for_segmentation(experiment: Experiment) -> Iterator[Problem]:
    """Built-in tasks other than ``segmentation`` can't use a class per pixel."""
    if is_smp(experiment.model.name) and experiment.task in ("classification", "regression"):
        message = f"{experiment.task} can't use {shortened(experiment.model.name)}, which returns masks"
        yield Problem(("task",), message, "write segmentation")


@rule("model.smp-missing", "model.name", "environment.python", "environment.container", looks_up_names=True)
def smp_is_installed(experiment: Experiment) -> Iterator[Problem]:
    """``smp/…`` needs the package, if the ranks use this command's Python."""
    name = experiment.model.name
    if is_smp(name) and (message := not_installed(experiment.environment, "segmentation_models_pytorch")):
        yield Problem(("model", "name"), message, "run pip install 'hpc-train[smp]', or name another model")


@rule("model.encoder", "model.name", "model.args", looks_up_names=True)
def encoder_is_known(experiment: Experiment) -> Problem | None:
    """smp or timm must know the encoder."""
    if not is_smp(experiment.model.name) or "encoder_name" not in experiment.model.args:
        return None
    of_smp, of_timm = model_facts.known_names("smp_encoders"), model_facts.known_names("timm")
    if of_smp is None or of_timm is None:
        return None
    return encoder_problem(experiment.model.args["encoder_name"], of_smp, of_timm)
