"""Splits a model into the stages of a pipeline: modules that, called in sequence, are equivalent to the
model.

Called by strategies that distribute layers, before they place a rank's part. The model's outer forward is
traced down to its repeated blocks, which remain unchanged, and cut between two of its steps.

The class of a model that can't be traced may have a method ``pipeline_parts() -> list[nn.Module]``:
submodules that are equivalent to its forward when each is called with the result of the previous one. The
model is then cut only between these. A model that names ``split_points()`` is cut there (``cuts``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from hpc_train.errors import BadFileError
from hpc_train.models.cuts import balanced_cuts, steps_of
from hpc_train.models.tracing import cant_be_cut, own_steps, passing_values, traced_in_both_modes, units_of

Graphs = dict[bool, fx.Graph]


class Stage(nn.Module):
    """Consecutive layers of a model: its own submodules, under their names in the model.

    Takes the result of the previous stage, one tensor or several; the first stage takes the batch's inputs.
    The last one returns the model's output.
    """

    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        self._is_last = is_last
        #: One per value of ``training``.
        self._run: dict[bool, Callable[..., Any]] = {}

    def forward(self, *inputs: Tensor) -> Any:
        """Run the stage's layers. Raises BadFileError if a value for the next stage is not a tensor."""
        outputs = self._run[self.training](self, *inputs)
        if not self._is_last:
            _refuse_non_tensors(outputs)
        return outputs


def split_model(model: nn.Module, blocks: Sequence[nn.Module], num_stages: int) -> list[Stage]:
    """Split ``model`` so that the largest stage has as few parameters as possible, and each at least one
    block.

    Without ``blocks``, a layer with parameters counts as one. The stages share the model's submodules and
    tensors, which may be on the meta device; modules that no step of the forward uses go to the last stage.
    Raises BadFileError if it can't be split.
    """
    units = units_of(model, blocks)
    graphs = traced_in_both_modes(model, units)
    cuts = balanced_cuts(steps_of(model, graphs[True], units), num_stages)
    pieces = {mode: _pieces(graph, cuts) for mode, graph in graphs.items()}
    held = _dealt_out(model, pieces[True])
    stages = [
        _stage(model, names, {mode: pieces[mode][i] for mode in pieces}, is_last=i == num_stages - 1)
        for i, names in enumerate(held)
    ]
    _share_hooks(model, stages)
    return stages


def most_stages(model: nn.Module, blocks: Sequence[nn.Module]) -> int:
    """Return the largest ``num_stages`` that ``split_model`` accepts; 1 if the model can't be split."""
    units = units_of(model, blocks)
    try:
        steps = steps_of(model, traced_in_both_modes(model, units)[True], units)
    except BadFileError:
        return 1
    ends = {step.num_blocks for step in steps if step.num_passing is not None and not step.tied}
    return len({*ends, steps[-1].num_blocks} - {0})


def _pieces(graph: fx.Graph, cuts: Sequence[int]) -> list[fx.Graph]:
    nodes = own_steps(graph)
    bounds = [0, *(cut + 1 for cut in cuts), len(nodes)]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    pieces: list[fx.Graph] = []
    for first, behind in pairwise(bounds):
        passing = passing_values(graph, nodes, behind - 1) if behind < len(nodes) else None
        pieces.append(_piece(inputs, nodes[first:behind], passing, output))
        inputs = passing or []
    return pieces


def _piece(
    inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], passing: Sequence[fx.Node] | None, output: fx.Node
) -> fx.Graph:
    """Copy ``nodes`` with the inputs ``inputs``; they return the values that cross the cut, in the last stage
    ``output``.
    """
    piece = fx.Graph()
    copies = {node: piece.placeholder(node.name) for node in inputs}

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:
            assert node.op == "get_attr", "steps come in order"
            copies[node] = piece.node_copy(node)
        return copies[node]

    for node in nodes:
        copies[node] = piece.node_copy(node, copy_of)
        # Otherwise the generated code makes fx look for "torch.arange" in its globals at each later trace.
        copies[node].meta.pop("is_wrapped", None)
    if passing is None:
        piece.output(map_arg(output.args[0], copy_of))
    else:
        results = tuple(copies[node] for node in passing)
        piece.output(results if len(results) > 1 else results[0])
    return piece


def _dealt_out(model: nn.Module, pieces: Sequence[fx.Graph]) -> list[set[str]]:
    """Return, per stage, the names of modules and tensors that it owns completely."""
    held = [
        {str(node.target) for node in piece.nodes if node.op in ("call_module", "get_attr")}
        for piece in pieces
    ]
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    owner = {id(value): names for names in held for name, value in tensors.items() if _is_within(name, names)}
    for name, value in tensors.items():
        if not any(_is_within(name, names) for names in held):
            owner.get(id(value), held[-1]).add(name)
    return held


def _is_within(name: str, held: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in held for end in range(1, len(parts) + 1))


def _stage(model: nn.Module, names: set[str], graphs: Graphs, *, is_last: bool) -> Stage:
    stage = Stage(is_last=is_last)
    _share(model, stage, names, "")
    stage._run = {mode: type(fx.GraphModule(stage, graph)).forward for mode, graph in graphs.items()}
    stage.training = model.training
    return stage


def _share(source: nn.Module, target: nn.Module, names: set[str], prefix: str) -> None:
    """Give ``target`` the modules and tensors ``names`` of ``source``, in the same order and under the same
    names.
    """
    for name, parameter in source._parameters.items():
        if prefix + name in names:
            target.register_parameter(name, parameter)
    for name, buffer in source._buffers.items():
        if prefix + name in names:
            target.register_buffer(name, buffer, name not in source._non_persistent_buffers_set)
    for name, child in source._modules.items():
        path = prefix + name
        if child is not None and path in names:
            target.add_module(name, child)
        elif child is not None and any(inner_name.startswith(path + ".") for inner_name in names):
            target.add_module(name, inner := nn.Module())
            inner.training = child.training
            _share(child, inner, names, path + ".")


def _share_hooks(model: nn.Module, stages: Sequence[Stage]) -> None:
    for hook in model._forward_pre_hooks.values():
        stages[0].register_forward_pre_hook(hook)
    for hook in model._forward_hooks.values():
        stages[-1].register_forward_hook(hook)


def _refuse_non_tensors(outputs: Any) -> None:
    for value in outputs if isinstance(outputs, tuple) else (outputs,):
        if not isinstance(value, Tensor):
            raise cant_be_cut(f"a {type(value).__name__}, which is not a tensor, passes between its blocks")
