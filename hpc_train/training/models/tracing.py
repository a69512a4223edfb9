"""The outer forward of a model as a graph of steps, for ``splitting``.

A step is a call of a module or a function; each repeated block, and each module next to them, is one step.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from hpc_train.errors import BadFileError
from hpc_train.training.models.blocks import own_modules

_REMEDY = "give its class a method pipeline_parts(), or write another parallel.strategy, like fsdp"
#: Become steps of the graph when they are called with sizes of a traced tensor.
FACTORIES = (torch.arange, torch.empty, torch.full, torch.ones, torch.zeros)


def cant_be_cut(reason: str, remedy: str = _REMEDY) -> BadFileError:
    """Return the error to raise."""
    return BadFileError(f"model.name: this model can't be cut into stages: {reason}; {remedy}")


def units_of(model: nn.Module, blocks: Sequence[nn.Module]) -> set[nn.Module]:
    """Return the modules of which each stage must have at least one."""
    if blocks:
        return set(blocks)
    return {m for m in model.modules() if m is not model and any(True for _ in m.parameters(recurse=False))}


class _Tracer(fx.Tracer):
    """Traces only into the modules around ``units``: all others are one step each."""

    def __init__(self, units: set[nn.Module], leaves: set[nn.Module]) -> None:
        timm = sys.modules.get("timm.layers")
        opaque = tuple(timm.get_notrace_functions()) if timm else ()
        super().__init__(autowrap_functions=(*FACTORIES, *filter(callable, opaque)))
        self._autowrap_search.append(torch)  # models look up the factory functions in torch
        self.proxy_buffer_attributes = True  # otherwise values computed from buffers become constants
        self.units, self.leaves = units, leaves
        #: The innermost module whose forward raised; None: the model's own.
        self.failed: nn.Module | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m in self.units or m in self.leaves:
            return True
        return not any(inner in self.units for inner in m.modules())

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or m
            raise

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Leave only one argument of the forward, the batch's inputs; the others keep their defaults."""
        inputs = self.create_proxy("placeholder", "inputs", (), {})
        return _outer_forward(self.root), [inputs]


def _outer_forward(model: nn.Module) -> Callable[[Any], Any]:
    parts = _parts(model)
    if not parts:
        return model.forward

    def chain(value: Any) -> Any:
        for part in parts:
            value = part(value)
        return value

    return chain


def _parts(model: nn.Module) -> list[nn.Module]:
    parts = own_modules(model, "pipeline_parts")
    if parts is None:
        return []
    held = {parameter for part in parts for parameter in part.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in held:
            raise cant_be_cut(
                f"no module that pipeline_parts() returned holds {name}, which would not be trained",
                "return all modules of the forward, or set requires_grad=False for that parameter",
            )
    return parts


def traced_in_both_modes(model: nn.Module, units: set[nn.Module]) -> dict[bool, fx.Graph]:
    """Return, per value of ``training``, the steps of the model's forward, whose only argument is the batch's
    inputs.

    The steps are the same for both, except for constants. Raises BadFileError if the model has no such graph.
    """
    modes = {module: module.training for module in model.modules()}
    graphs: dict[bool, fx.Graph] = {}
    try:
        for mode in (True, False):
            for module in modes:
                module.training = mode
            with _refused_randomness():
                graphs[mode] = _traced(model, units)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if [(n.op, n.target) for n in graphs[True].nodes] != [(n.op, n.target) for n in graphs[False].nodes]:
        raise cant_be_cut("its forward differs between training and evaluation")
    return graphs


def _traced(model: nn.Module, units: set[nn.Module]) -> fx.Graph:
    """Trace the outer forward; a module in it that can't be traced is one step."""
    leaves = set(_parts(model))
    while True:
        tracer = _Tracer(units, leaves)
        try:
            graph = tracer.trace(model)
        except Exception as error:  # any error of a forward without real tensors
            if tracer.failed is None or tracer.failed in leaves:
                raise cant_be_cut(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
            leaves.add(tracer.failed)
            continue
        finally:
            constants = [name for name in vars(model) if name.startswith("_tensor_constant")]
            for name in constants:
                delattr(model, name)
        if constants:
            raise cant_be_cut(
                "its forward creates a tensor that does not depend on the batch, outside of modules"
            )
        return graph


@contextmanager
def _refused_randomness() -> Iterator[None]:
    """Reject a forward that draws random numbers itself: traced, they would be the same at each step."""
    before = _random_states()
    yield
    if _random_states() != before:
        raise cant_be_cut("its forward draws random numbers outside of modules")


def _random_states() -> tuple[str, ...]:
    states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state().tolist()
    return tuple(repr(state) for state in states)


def own_steps(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes to distribute; parameters and buffers are fetched by the stage that uses them."""
    return [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def passing_values(graph: fx.Graph, nodes: Sequence[fx.Node], cut: int) -> list[fx.Node]:
    """Return the values computed up to step ``cut`` and used after it, in order of computation."""
    before = {node for node in graph.nodes if node.op == "placeholder"} | set(nodes[: cut + 1])
    return [node for node in graph.nodes if node in before and any(user not in before for user in node.users)]
