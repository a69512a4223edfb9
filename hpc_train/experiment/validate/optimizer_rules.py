"""Rules on the optimizer and the schedule: their names and arguments, and which parameters they accept.

Arguments of torch's optimizers are in a table, those of timm's come from the child of ``model_facts``.
Checks that ranks repeat are functions that return or yield a ``Problem``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from hpc_train.errors import shortened
from hpc_train.experiment.config.problems import KeyPath, Problem, shown, unknown_argument_problem
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.synonyms import argument_for, value_for
from hpc_train.experiment.config.training_sections import OptimizerConfig
from hpc_train.experiment.topology.learning_rate import OVER_SPAN, OVER_STEPS, argument_problems
from hpc_train.experiment.validate import model_facts
from hpc_train.experiment.validate.base import rule
from hpc_train.experiment.validate.part_rules import own_arguments
from hpc_train.registry import is_factory, nearest, parts, split_name, unknown_name

_PATH: KeyPath = ("optimization", "optimizer")
_ARGS: KeyPath = (*_PATH, "args")
#: The classes of torch.optim, in lower case, except the unusable ones → their arguments besides ``params``
#: and ``lr``. Compared by a test.
TORCH_OPTIMIZERS = {
    "adadelta": "rho eps weight_decay foreach capturable maximize differentiable",
    "adafactor": "beta2_decay eps d weight_decay foreach maximize",
    "adagrad": "lr_decay weight_decay initial_accumulator_value eps foreach maximize differentiable fused",
    "adam": (
        "betas eps weight_decay amsgrad foreach maximize capturable differentiable fused "
        "decoupled_weight_decay"
    ),
    "adamax": "betas eps weight_decay foreach maximize differentiable capturable",
    "adamw": "betas eps weight_decay amsgrad maximize foreach capturable differentiable fused",
    "asgd": "lambd alpha t0 weight_decay foreach maximize differentiable capturable",
    "muon": "weight_decay momentum nesterov ns_coefficients eps ns_steps adjust_lr_fn",
    "nadam": (
        "betas eps weight_decay momentum_decay decoupled_weight_decay foreach maximize capturable "
        "differentiable"
    ),
    "radam": "betas eps weight_decay decoupled_weight_decay foreach maximize capturable differentiable",
    "rmsprop": "alpha eps weight_decay momentum centered capturable foreach maximize differentiable",
    "rprop": "etas step_sizes capturable foreach maximize differentiable",
    "sgd": "momentum dampening weight_decay nesterov maximize foreach differentiable fused",
}
_NO_CHECKPOINT = "keeps lists of tensors and its own random generator, which a checkpoint can't save"
#: Optimizers of torch and timm that no run can use → the reason, and the remedy.
UNUSABLE_OPTIMIZERS = {
    "adahessian": ("needs second derivatives, which the backward pass does not retain", "write adamw"),
    "kron": (_NO_CHECKPOINT, "write adamw"),
    "kronc": (_NO_CHECKPOINT, "write adamw"),
    "kronw": (_NO_CHECKPOINT, "write adamw"),
    "lbfgs": ("evaluates the loss several times per step, which is not supported", "write adamw"),
    "sparseadam": ("supports sparse gradients only, and gradients are dense", "write adam"),
}
#: Arguments that are true, false or, for torch's default, null.
_SWITCHES = (
    "nesterov", "amsgrad", "centered", "fused", "foreach", "maximize", "capturable", "differentiable",
)  # fmt: skip


@rule("optimizer.unknown", "optimization.optimizer.name", looks_up_names=True)
def optimizer_is_known(experiment: Experiment) -> Problem | None:
    """torch or timm must know the optimizer, and it must be supported."""
    name = experiment.optimization.optimizer.name
    return problem_of_optimizer(name, lambda: model_facts.known_names("timm_optimizers"))


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
    close = value_for(path, rest) or nearest(rest, names)
    meant = f"{provider}/{close}" if provider else close
    remedy = f"did you mean {meant}?" if close else "write one of torch.optim or timm.optim, like adamw"
    return Problem(path, f"there is no optimizer '{shortened(name)}'", remedy)


@rule("optimizer.fused-sgd", "optimization.optimizer", "precision")
def fused_sgd_fits_the_precision(experiment: Experiment) -> Problem | None:
    """Fused SGD must not run under fp16's scaler."""
    optimizer = experiment.optimization.optimizer
    return unfit_fused_sgd(optimizer.name, optimizer.args) if experiment.precision == "fp16" else None


def unfit_fused_sgd(name: str, args: Mapping[str, object]) -> Problem | None:
    """Return the problem with fused SGD if a scaler skips steps, or gradients are sparse."""
    if name.lower() not in {"sgd", "torch/sgd"} or not args.get("fused"):
        return None
    message = (
        "fused sgd is wrong under precision: fp16, whose scaler skips steps, and takes no sparse gradients"
    )
    return Problem(("optimization", "optimizer", "args", "fused"), message, "omit it")


@rule("optimizer.arguments", "optimization.optimizer", looks_up_names=True)
def optimizer_takes_its_arguments(experiment: Experiment) -> Iterator[Problem]:
    """The optimizer must have the keys and arguments of the file, with values that it accepts."""
    optimizer = experiment.optimization.optimizer
    accepted = _arguments_of(optimizer)
    if accepted is not None:
        yield from lacking_arguments(optimizer, accepted)
        yield from _unusable_values(optimizer)


def _arguments_of(optimizer: OptimizerConfig) -> list[str] | None:
    """Return the names of the optimizer's arguments; None if unknown here, or if the file has none."""
    values = (optimizer.momentum, optimizer.weight_decay, *(group.weight_decay for group in optimizer.groups))
    if not optimizer.args and optimizer.decay_norm_and_bias and all(value is None for value in values):
        return None
    provider, _, name = optimizer.name.lower().rpartition("/")
    if provider in {"", "torch"} and name in TORCH_OPTIMIZERS:
        return TORCH_OPTIMIZERS[name].split()
    return model_facts.known_names(f"timm_optimizers/{name}") if provider in {"", "timm"} else None


def lacking_arguments(optimizer: OptimizerConfig, accepted: Collection[str]) -> Iterator[Problem]:
    """Yield the problems with keys and arguments of the file that are not ``accepted``."""
    name = shortened(optimizer.name)
    for key in ("momentum", "weight_decay"):
        if getattr(optimizer, key) is not None and key not in accepted:
            betas = "; the first of its betas in args is similar" if "betas" in accepted else ""
            remedy = f"take it out{betas if key == 'momentum' else ''}"
            yield Problem((*_PATH, key), f"{name} has no {key}", remedy, on_key=True)
    if "weight_decay" not in accepted:
        for index, group in enumerate(optimizer.groups):
            if group.weight_decay is not None:
                path = (*_PATH, "groups", index, "weight_decay")
                yield Problem(path, f"{name} has no weight_decay", "take it out", on_key=True)
        if not optimizer.decay_norm_and_bias:
            path = (*_PATH, "decay_norm_and_bias")
            yield Problem(path, f"{name} has no weight_decay", "take it out", on_key=True)
    known = sorted(set(accepted) - {"lr", "momentum", "weight_decay"})
    for argument in own_arguments(_ARGS, optimizer.args):
        if argument not in known:
            meant = argument_for(_PATH, argument)
            problem = unknown_argument_problem(_ARGS, optimizer.name, argument, known, meant)
            yield replace(problem, path=(*_ARGS, argument), on_key=True)


def _unusable_values(optimizer: OptimizerConfig) -> Iterator[Problem]:
    for argument, value in optimizer.args.items():
        path = (*_ARGS, argument)
        if argument in _SWITCHES and not isinstance(value, bool | None):
            yield Problem(path, f"needs true or false, got {shown(value)}", "write true")
        if argument == "betas" and not _are_betas(value):
            message = f"needs a list of numbers of at least 0 and below 1, got {shown(value)}"
            yield Problem(path, message, "write [0.9, 0.999]")
    if optimizer.args.get("nesterov") is True and optimizer.name.lower() in {"sgd", "torch/sgd"}:
        if not optimizer.momentum:
            remedy = "write optimization.optimizer.momentum: 0.9"
            yield Problem((*_ARGS, "nesterov"), "needs a momentum", remedy)
        if optimizer.args.get("dampening"):
            yield Problem((*_ARGS, "dampening"), "must be 0 with nesterov", "take it out", on_key=True)


def _are_betas(value: object) -> bool:
    numbers = value if isinstance(value, list) else []
    return len(numbers) > 1 and all(type(beta) in (int, float) and 0 <= beta < 1 for beta in numbers)


@rule("optimizer.matrices", "optimization.optimizer", "model.name", "model.freeze", "model.lora")
def muon_trains_matrices(experiment: Experiment) -> Iterator[Problem]:
    """torch's Muon takes matrices only, and each model of a provider has norms or biases as well."""
    name, model = experiment.optimization.optimizer.name, experiment.model
    is_built_in = not is_factory(model.name) and split_name(model.name)[0] in parts("models")
    if name.lower() in {"muon", "torch/muon"} and is_built_in and not model.freeze and model.lora is None:
        message = f"{name} updates matrices (2D parameters) only, and {shortened(model.name)} has others"
        yield Problem((*_PATH, "name"), message, "write timm/muon, which updates the others by AdamW")


@rule("schedule.unknown", "optimization.schedule.name", looks_up_names=True)
def schedule_is_known(experiment: Experiment) -> Problem | None:
    """The learning rate schedule must be built in."""
    return problem_of_schedule_name(experiment.optimization.schedule.name)


def problem_of_schedule_name(name: str) -> Problem | None:
    """Return the problem with the name of a learning rate schedule, or None."""
    built_in = [*OVER_SPAN, *OVER_STEPS]
    if name in built_in:
        return None
    path = ("optimization", "schedule", "name")
    message, remedy = unknown_name("schedule", name, built_in)
    meant = value_for(path, name)
    return Problem(path, message, f"write {meant}" if meant in built_in else remedy)


@rule("schedule.arguments", "optimization.schedule")
def schedule_takes_its_arguments(experiment: Experiment) -> Iterator[Problem]:
    """``optimization.schedule.args`` must be those of the schedule."""
    return argument_problems(experiment.optimization.schedule)
