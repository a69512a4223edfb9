"""The file's optimizer, its parameter groups, its schedule of the learning rate, and fp16's loss scale.

``train_state.build`` creates an ``Optimization`` after the strategy placed the model; ``step`` calls it. The
schedule is a function of the step, counted from 0, as a factor of the peak: no state of it is saved.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.fields import Arguments
from hpc_train.experiment.config.training_sections import OptimizerConfig, ScheduleConfig
from hpc_train.experiment.topology import batch_arithmetic, learning_rate
from hpc_train.experiment.validate import optimizer_rules, part_rules
from hpc_train.training.distributed.device import Precision
from hpc_train.training.models.fine_tuning import parameters_by_name, selected
from hpc_train.training.strategies.pieces import local_part

_KEY, _ARGS = "optimization.optimizer", ("optimization", "optimizer", "args")
#: Keys of the file that are also arguments of the optimizer's class.
_OWN_KEYS = ("lr", "momentum", "weight_decay")
#: torch's optimizers that update all parameters in one kernel, on these devices. On the CPU torch's default
#: is to update them one by one.
_FUSED = ("adam", "adamw", "sgd")
_FUSED_DEVICES = ("cpu", "cuda")
#: Arguments that choose a kernel.
_KERNEL_ARGUMENTS = ("foreach", "fused", "differentiable")
_Maker = Callable[[list[dict[str, Any]], Arguments], torch.optim.Optimizer]
_GROUPS = "optimization.optimizer.groups"


class Optimization:
    """Owns the optimizer, the schedule and, only under fp16, ``scaler``. Every rank makes the same calls."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: learning_rate.Schedule,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self.optimizer = optimizer
        self.scaler = _Scaler(device.type) if precision.needs_scaler else None
        if self.scaler is not None:
            # Create the scale now, not with the first loss: a stage without a loss unscales, too.
            self.scaler.scale(torch.zeros((), device=device))
        self._schedule = schedule
        self._peak_lr = float(optimizer.defaults["lr"])
        self._peak_lrs = [float(group["lr"]) for group in optimizer.param_groups]

    def set_learning_rate(self, step: int) -> float:
        """Set the learning rate of step ``step``, counted from 0. Returns the rate without ``layer_decay``,
        as in rows of metrics; with it, all groups of this rank may have lower rates.
        """
        factor = self._schedule(step)
        for group, peak in zip(self.optimizer.param_groups, self._peak_lrs, strict=True):
            group["lr"] = peak * factor
        return self._peak_lr * factor

    def scale(self, loss: Tensor) -> Tensor:
        """Return the tensor to call backward on: the loss, scaled under fp16 until ``unscale_gradients``."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale_gradients(self) -> None:
        """Divide the gradients by the loss scale under fp16. Collective: ranks agree on an overflow."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
            # Propagate an overflow on one rank to all ranks. Collective. torch does so for the DTensors of
            # one list, by the first one's placements: not if that one is replicated.
            if dist.is_initialized() and dist.get_world_size() > 1:
                for overflow in self.scaler._found_inf_per_device(self.optimizer).values():
                    dist.all_reduce(local_part(overflow), op=dist.ReduceOp.MAX)

    def step(self, *, is_allowed: bool = True) -> None:
        """Update the weights with the unscaled gradients, if ``is_allowed``.

        Collective if parameters are sharded. Under fp16, if gradients overflowed on any rank, no rank changes
        weights or optimizer state, and the scale is halved; it still counts as a step (the schedule and the
        data continue). Waits for the device only under fp16.
        """
        if is_allowed and self.scaler is None:
            self.optimizer.step()
        elif is_allowed and self.scaler is not None:
            self.scaler.step(self.optimizer)
        if self.scaler is not None:
            self.scaler.update()

    def zero_grad(self) -> None:
        """Free the gradients."""
        if type(self.optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
            self.optimizer.zero_grad(set_to_none=True)
            return
        # Same as torch's, without its profiler range, which takes longer.
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


class _Scaler(torch.amp.GradScaler):
    """torch's scaler, run on local parts if DTensors have several meshes, since its kernel is known to accept
    several meshes only in torch 2.15.
    """

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        trained = [value for group in optimizer.param_groups for value in group["params"]]
        if _num_meshes(trained) > 1:
            group = {"params": [own_part(value) for value in trained if value.grad is not None]}
            optimizer = SimpleNamespace(param_groups=[group])
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)


def own_part(parameter: Tensor) -> Tensor:
    """Return a tensor whose gradient is this rank's part of the parameter's gradient, in the same memory."""
    with torch.no_grad():
        part, gradient = (
            value.to_local() if isinstance(value, DTensor) else value.detach()
            for value in (parameter, cast(Tensor, parameter.grad))
        )
    part = part.detach()
    part.grad = gradient
    return part


def make_optimizer(
    config: OptimizerConfig,
    parameters: Mapping[str, nn.Parameter],
    global_batch_size: int,
    depths: Mapping[str, int] | None = None,
    matched: Mapping[str, int] | None = None,
    *,
    may_fuse: bool = True,
) -> torch.optim.Optimizer:
    """Make the optimizer of ``Strategy.optimized``. Raises BadFileError.

    ``depths``: each parameter's depth (``models.blocks``), if the file has ``layer_decay``; ``matched``: the
    result of ``parameter_groups.matched_groups``, if it has ``groups``. ``may_fuse``: False for sparse
    gradients, which fused kernels refuse, and for a scaler: fused SGD, if the scaler skips its first step,
    continues from a momentum buffer that was never written (torch 2.15, ``torch.optim.sgd``).
    """
    make, kind = _find(config.name)
    arguments = _arguments(config, kind, global_batch_size)
    if config.name.lower().removeprefix("torch/") in _FUSED:
        arguments = _with_kernel(arguments, list(parameters.values()), may_fuse=may_fuse)
    if not may_fuse and (problem := optimizer_rules.unfit_fused_sgd(config.name, config.args)):
        raise problem.as_error()
    if kind is getattr(torch.optim, "Muon", None):
        _refuse_other_than_matrices(config.name, parameters)
    try:
        return make(parameter_groups(config, parameters, arguments["lr"], depths, matched), arguments)
    except Exception as error:  # from the optimizer's code, for values of args
        reason = f"{type(error).__name__}: {error}"
        raise BadFileError(f"{_KEY}.args: {config.name} can't be built: {reason}; fix them") from error


def _refuse_other_than_matrices(name: str, parameters: Mapping[str, nn.Parameter]) -> None:
    others = [name for name, value in parameters.items() if value.requires_grad and value.dim() != 2]
    if not others:
        return
    shown = f"{others[0]} of shape {tuple(parameters[others[0]].shape)}"
    trained = sum(value.requires_grad for value in parameters.values())
    raise BadFileError(
        f"{_KEY}.name: {name} updates matrices only, and {len(others)} of the {trained} trained parameters "
        f"have other shapes, such as {shown}; write timm/muon, which updates these by AdamW, or adamw"
    )


def _with_kernel(arguments: Arguments, parameters: Sequence[nn.Parameter], *, may_fuse: bool) -> Arguments:
    """Add arguments for the fastest kernels, unless the file chooses others.

    DTensors have no fused SGD, and torch's default updates them one by one, each through DTensor's dispatch.
    ``foreach`` is known to accept DTensors of several meshes only in torch 2.15, so it is not used for them.
    """
    if any(arguments.get(key) is not None for key in _KERNEL_ARGUMENTS):
        return arguments
    if num_meshes := _num_meshes(parameters):
        return arguments | {"foreach": num_meshes == 1}
    is_supported = may_fuse and all(value.device.type in _FUSED_DEVICES for value in parameters)
    return arguments | ({"fused": True} if is_supported else {})


def _num_meshes(parameters: Iterable[nn.Parameter]) -> int:
    return len({parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)})


def _find(name: str) -> tuple[_Maker, type[torch.optim.Optimizer]]:
    """Return a factory for the optimizer ``name``, and its class. Imports timm only for timm's optimizers."""

    def names_of_timm() -> list[str]:
        from timm import optim

        return cast("list[str]", optim.list_optimizers())

    if problem := optimizer_rules.problem_of_optimizer(name, names_of_timm):
        raise problem.as_error()
    provider, _, rest = name.lower().rpartition("/")
    if provider != "timm" and rest in (of_torch := _torch_classes()):
        kind = of_torch[rest]
        return lambda groups, arguments: kind(groups, **arguments), kind
    return _timm_maker(rest), _timm_class(rest)


def _torch_classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Return torch.optim's classes by lower-case name, except classes that no run can use."""
    return {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
        and name.lower() not in optimizer_rules.UNUSABLE_OPTIMIZERS
    }


def _timm_class(name: str) -> type[torch.optim.Optimizer]:
    from timm import optim

    try:
        kind: type[torch.optim.Optimizer] = optim.get_optimizer_class(name, bind_defaults=False)
    except (ImportError, AssertionError) as error:
        raise BadFileError(f"{_KEY}.name: {name} can't be used here: {error}; name another") from error
    return kind


def _timm_maker(name: str) -> _Maker:
    """Return timm's factory, which sets its own defaults (momentum 0.9, nesterov) if the file has none."""

    def make(groups: list[dict[str, Any]], arguments: Arguments) -> torch.optim.Optimizer:
        from timm import optim

        # The factory's own default is 0, whatever the class's default is.
        default = inspect.signature(_timm_class(name)).parameters["weight_decay"].default
        return optim.create_optimizer_v2(groups, opt=name, **({"weight_decay": default} | arguments))

    return make


def _arguments(
    config: OptimizerConfig, kind: type[torch.optim.Optimizer], global_batch_size: int
) -> Arguments:
    """Return the keyword arguments: the file's keys, if the class accepts them, and ``args``."""
    taken = inspect.signature(kind).parameters
    scale = 1 if config.lr_per_batch is None else global_batch_size / config.lr_per_batch
    arguments: Arguments = {"lr": config.lr * scale}
    for problem in optimizer_rules.lacking_arguments(config, [*taken.keys() - {"self", "params", "kwargs"}]):
        raise problem.as_error()
    for key in ("momentum", "weight_decay"):
        if (value := getattr(config, key)) is not None:
            arguments[key] = value
    for key, value in config.args.items():
        if key in _OWN_KEYS:
            raise part_rules.not_an_argument(_ARGS, key, f"{_KEY}.{key}").as_error()
        arguments[key] = tuple(value) if isinstance(value, list) else value
    return arguments


def matched_groups(config: OptimizerConfig, model: nn.Module) -> dict[str, int]:
    """Return name → index in ``groups`` of each trained parameter that matches a pattern.

    A shared parameter is matched by its first name. ``model``: whole, before it is placed. Raises
    BadFileError if a pattern matches no trained parameter.
    """
    trained = {name: value for name, value in parameters_by_name(model).items() if value.requires_grad}
    first_names = {id(value): name for name, value in reversed(trained.items())}
    groups: dict[str, int] = {}
    for index, group in enumerate(config.groups):
        names = selected(trained, group.match, f"{_GROUPS}[{index}].match", "trained parameter")
        for name in names:
            groups.setdefault(first_names[id(trained[name])], index)
    return groups


def parameter_groups(
    config: OptimizerConfig,
    parameters: Mapping[str, nn.Parameter],
    lr: float,
    depths: Mapping[str, int] | None = None,
    matched: Mapping[str, int] | None = None,
) -> list[dict[str, Any]]:
    """Return one group per layer and entry of ``groups``; with ``decay_norm_and_bias: false`` two, with and
    without weight decay.

    ``depths``: each parameter's depth (``models.blocks``) if layers have their own rates, else None;
    ``matched``: the result of ``matched_groups``. Ranks with the same parameters get the same groups in the
    same order, the last layers first: their rate is ``lr`` itself.
    """
    trained = {name: value for name, value in parameters.items() if value.requires_grad}
    if not depths and not matched:
        return _by_decay(config, list(trained.values()))
    deepest = max(depths.values()) if depths else 0
    by_place: dict[tuple[int, int], list[nn.Parameter]] = {}
    for name, value in trained.items():
        levels_below = deepest - depths[name] if depths else 0
        place = levels_below, (matched or {}).get(name, len(config.groups))
        by_place.setdefault(place, []).append(value)
    groups: list[dict[str, Any]] = []
    for (levels_below, index), values in sorted(by_place.items(), key=lambda item: item[0]):
        settings = _settings(config, lr, levels_below, index)
        groups += [settings | group for group in _by_decay(config, values)]
    return groups


def _settings(config: OptimizerConfig, lr: float, levels_below: int, index: int) -> dict[str, Any]:
    """Return a group's values; ``index`` is that in ``groups``, or their number if none matches."""
    rate = lr if config.layer_decay is None else lr * config.layer_decay**levels_below
    if index == len(config.groups):
        return {"lr": rate}
    group = config.groups[index]
    decay = {} if group.weight_decay is None else {"weight_decay": group.weight_decay}
    return {"lr": rate * group.lr_factor} | decay


def _by_decay(config: OptimizerConfig, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    if config.decay_norm_and_bias:
        return [{"params": parameters}]
    decayed = [value for value in parameters if value.dim() >= 2]
    others = [value for value in parameters if value.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_schedule(config: ScheduleConfig, total_steps: int, steps_per_epoch: int) -> learning_rate.Schedule:
    """Return the factor of each of ``total_steps`` steps: linear warm-up, then the schedule of ``config``.

    Warm-up is (step + 1) / warmup_steps. Schedules of ``OVER_SPAN`` run over the steps after it; schedules of
    ``OVER_STEPS`` count from the start of the run, so that "epoch 30" is the run's. Raises BadFileError.
    """
    if problem := optimizer_rules.problem_of_schedule_name(config.name):
        raise problem.as_error()
    warmup = batch_arithmetic.count_warmup_steps(config, steps_per_epoch)
    if total_steps > 0 and (problem := batch_arithmetic.too_long_warmup(config, warmup, total_steps)):
        raise problem.as_error()
    arguments = learning_rate.ScheduleArguments(config, steps_per_epoch)
    over_span = config.name in learning_rate.OVER_SPAN
    shapes = learning_rate.OVER_SPAN if over_span else learning_rate.OVER_STEPS
    factor: Callable[..., float] = shapes[config.name](arguments)
    arguments.refuse_unused()
    floor = config.min_factor

    def schedule(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if over_span:
            return floor + (1 - floor) * factor((step - warmup) / (total_steps - warmup))
        return max(floor, factor(step))

    return schedule
