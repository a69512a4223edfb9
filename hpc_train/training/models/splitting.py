"""Splits a model into the stages of a pipeline: modules that, called in sequence, are equivalent to the
model.

Called by strategies that distribute layers, before they place a rank's part. The model's outer forward is
traced down to its repeated blocks, which remain unchanged, and cut between two of its steps.

The class of a model that can't be traced may have a method ``pipeline_parts() -> list[nn.Module]``:
submodules that are equivalent to its forward when each is called with the result of the previous one. The
model is then cut only between these. It may have a method ``split_points() -> list[str]``: names of
submodules. The model is then cut only directly before these.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from hpc_train.errors import BadFileError
from hpc_train.training.models import tracing
from hpc_train.training.models.blocks import own_list

Graphs = dict[bool, fx.Graph]
_SIZES = (
    *("shape", "size", "dim", "ndim", "ndimension", "numel", "stride"),
    *("device", "dtype", "item", "tolist"),
)
_SEVERAL = ("chunk", "split", "tensor_split", "unbind")
#: Costs of a value that crosses a cut; cuts with unknown values are used only if there is no alternative.
_NO_TENSOR, _TENSOR, _UNKNOWN = 0, 1, 1000


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
            for value in outputs if isinstance(outputs, tuple) else (outputs,):
                if not isinstance(value, Tensor):
                    kind = type(value).__name__
                    raise tracing.cant_be_cut(f"a {kind}, which is not a tensor, passes between its blocks")
        return outputs


def split_model(model: nn.Module, blocks: Sequence[nn.Module], num_stages: int) -> list[Stage]:
    """Split ``model`` so that the largest stage has as few parameters as possible, and each at least one
    block.

    Without ``blocks``, a layer with parameters counts as one. The stages share the model's submodules and
    tensors, which may be on the meta device; modules that no step of the forward uses go to the last stage.
    Raises BadFileError if it can't be split.
    """
    units = tracing.units_of(model, blocks)
    graphs = tracing.traced_in_both_modes(model, units)
    cuts = balanced_cuts(steps_of(model, graphs[True], units), num_stages)
    pieces = {mode: _pieces(graph, cuts) for mode, graph in graphs.items()}
    held = _dealt_out(model, pieces[True])
    stages = [
        _stage(model, names, {mode: pieces[mode][i] for mode in pieces}, is_last=i == num_stages - 1)
        for i, names in enumerate(held)
    ]
    for hook in model._forward_pre_hooks.values():
        stages[0].register_forward_pre_hook(hook)
    for hook in model._forward_hooks.values():
        stages[-1].register_forward_hook(hook)
    return stages


def most_stages(model: nn.Module, blocks: Sequence[nn.Module]) -> int:
    """Return the largest ``num_stages`` that ``split_model`` accepts; 1 if the model can't be split."""
    units = tracing.units_of(model, blocks)
    try:
        steps = steps_of(model, tracing.traced_in_both_modes(model, units)[True], units)
    except BadFileError:
        return 1
    ends = {step.num_blocks for step in steps if step.num_passing is not None and not step.tied}
    return len({*ends, steps[-1].num_blocks} - {0})


def _pieces(graph: fx.Graph, cuts: Sequence[int]) -> list[fx.Graph]:
    nodes = tracing.own_steps(graph)
    bounds = [0, *(cut + 1 for cut in cuts), len(nodes)]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    pieces: list[fx.Graph] = []
    for first, behind in pairwise(bounds):
        passing = tracing.passing_values(graph, nodes, behind - 1) if behind < len(nodes) else None
        pieces.append(_piece(inputs, nodes[first:behind], passing, output))
        inputs = passing or []
    return pieces


def _piece(
    inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], passing: Sequence[fx.Node] | None, output: fx.Node
) -> fx.Graph:
    """Copy ``nodes``; the copy returns the values that cross the cut, in the last stage ``output``."""
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
    """Give ``target`` the modules and tensors ``names`` of ``source``, in its order and under its names."""
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


@dataclass(frozen=True)
class Step:
    """A step of the forward, and the cut after it."""

    #: Total size of the parameters that the forward has used so far.
    num_parameters: int
    #: Blocks that the forward has entered so far. If the model names its split points, the steps between two
    #: of them are a block.
    num_blocks: int
    #: How many values cross this cut; None: one of them can't cross.
    num_passing: int | None
    #: Names of a tensor that is used on both sides.
    tied: str | None


def steps_of(model: nn.Module, graph: fx.Graph, units: set[nn.Module]) -> list[Step]:
    """Return the steps of ``graph``, in which each of ``units`` counts as a block."""
    nodes = tracing.own_steps(graph)
    kinds: dict[fx.Node, int] = {}  # the cost of passing a step's result across a cut; 0 if not a tensor
    for node in graph.nodes:
        kinds[node] = _kind(node, kinds)
    tied = _tied(model, nodes)
    points = _split_points(model, nodes)
    steps: list[Step] = []
    seen: dict[int, int] = {}
    blocks: set[nn.Module] = set()
    for i, node in enumerate(nodes):
        seen |= {id(p): p.numel() for p in _held(model, node) if isinstance(p, nn.Parameter)}
        blocks |= units.intersection(_modules(model, node))
        num_blocks = len(blocks) if points is None else 1 + sum(point <= i for point in points)
        counts = [kinds[value] for value in tracing.passing_values(graph, nodes, i)]
        can_pass = all(counts) and (points is None or i + 1 in points)
        num_passing = sum(counts) if can_pass and not _is_changed_next(model, graph, nodes, i) else None
        steps.append(Step(sum(seen.values()), num_blocks, num_passing, tied.get(i)))
    return steps


def _split_points(model: nn.Module, nodes: Sequence[fx.Node]) -> set[int] | None:
    """Return the steps before which the model may be cut; None if it names no split points."""
    names = own_list(model, "split_points", str, "a list of names, like ['layers.2']")
    if names is None:
        return None
    targets = [str(node.target) + "." if node.op == "call_module" else "" for node in nodes]
    points: set[int] = set()
    for name in names:
        first = next((i for i, target in enumerate(targets) if target.startswith(f"{name}.")), None)
        if first is None:
            reason = f"split_points() names {name}, which is not a submodule that its forward calls"
            raise tracing.cant_be_cut(reason, "name submodules as in named_modules()")
        points.add(first)
    return _between_parameters(model, nodes, points)


def _between_parameters(model: nn.Module, nodes: Sequence[fx.Node], points: Iterable[int]) -> set[int]:
    """Return the ``points`` that leave no stage without parameters to train."""
    holds = [any(isinstance(value, nn.Parameter) for value in _held(model, node)) for node in nodes]
    selected = [0]
    for point in sorted(points):
        if any(holds[selected[-1] : point]) and any(holds[point:]):
            selected.append(point)
    return set(selected[1:])


def _modules(model: nn.Module, node: fx.Node) -> list[nn.Module]:
    return list(model.get_submodule(str(node.target)).modules()) if node.op == "call_module" else []


def _held(model: nn.Module, node: fx.Node) -> list[Tensor]:
    """Return the parameters and buffers that this step needs."""
    fetched = [_tensor(model, source) for source in node.all_input_nodes if source.op == "get_attr"]
    inner = [
        value for m in _modules(model, node) for value in (*m._parameters.values(), *m._buffers.values())
    ]
    return [value for value in (*fetched, *inner) if value is not None]


def _tensor(model: nn.Module, node: fx.Node) -> Tensor:
    module, _, name = str(node.target).rpartition(".")
    owner = model.get_submodule(module)
    if name not in owner._parameters and name not in owner._buffers:
        raise tracing.cant_be_cut(
            f"{node.target} is neither a parameter nor a buffer", "register_buffer() makes it one"
        )
    return cast(Tensor, getattr(owner, name))


def _tied(model: nn.Module, nodes: Sequence[fx.Node]) -> dict[int, str]:
    """Return, per cut, the names of a tensor that is saved and used on both sides of it."""
    names: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(name)
    places: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        for value in _held(model, node):
            if id(value) in names:
                places.setdefault(id(value), []).append(i)
    joined = {key: " and ".join(entries[:2]) for key, entries in names.items()}
    return {i: joined[key] for key, entries in places.items() for i in range(entries[0], entries[-1])}


def _is_changed_next(model: nn.Module, graph: fx.Graph, nodes: Sequence[fx.Node], cut: int) -> bool:
    """Return True if a step after the cut modifies a crossing value in place; autograd rejects it for inputs.

    The result of a step without parameters (flatten, an identity) may be a view of its input.
    """
    views = set(tracing.passing_values(graph, nodes, cut))
    for node in nodes[cut + 1 :]:
        if views.intersection(node.all_input_nodes):
            if _is_in_place(model, node):
                return True
            if not _held(model, node):
                views.add(node)
    return False


def _is_in_place(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        # A step with parameters applies them first, and changes that result.
        modules = _modules(model, node)[: 1 if _held(model, node) else None]
        return any(getattr(module, "inplace", False) for module in modules)
    name = getattr(node.target, "__name__", str(node.target))
    return (name.endswith("_") and not name.endswith("__")) or bool(node.kwargs.get("inplace"))


def _kind(node: fx.Node, kinds: dict[fx.Node, int]) -> int:
    name = getattr(node.target, "__name__", str(node.target))
    if node.op == "call_module":
        return _NO_TENSOR if any(_is_element(user) for user in node.users) else _TENSOR
    if node.op not in ("call_function", "call_method") or node.target in tracing.FACTORIES:
        return _TENSOR
    if name in _SEVERAL:
        return _NO_TENSOR
    if name in _SIZES or (node.target is getattr and node.args[1] in _SIZES):
        return _NO_TENSOR
    if _is_element(node) and (source := node.all_input_nodes[0]).op == "call_module":
        return _UNKNOWN
    if _is_element(node) and getattr(source.target, "__name__", source.target) in _SEVERAL:
        return _TENSOR
    costs = [kinds[source] for source in node.all_input_nodes]
    return _TENSOR if _TENSOR in costs else max(costs, default=_NO_TENSOR)


def _is_element(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[1], int)


#: (parameters of the largest stage, costs of crossing values, steps to cut after): the smaller the better.
_Cuts = tuple[int, int, tuple[int, ...]]


def balanced_cuts(steps: Sequence[Step], num_stages: int) -> tuple[int, ...]:
    """Return the steps after which to cut, so that the largest stage has as few parameters as possible."""
    num_blocks = steps[-1].num_blocks if steps else 0
    if num_blocks < num_stages:
        remedy = f"write at most {num_blocks}" if num_blocks > 1 else "write another parallel.strategy"
        raise BadFileError(
            f"parallel.pipeline: {num_stages} stages need a block, or a part between split_points(), each, "
            f"and this model has {num_blocks}; {remedy}"
        )
    # One stage has no cuts.
    if (cuts := _best(steps, num_stages, are_tied_kept=True)) is not None:
        return cuts
    if cuts := _best(steps, num_stages, are_tied_kept=False):
        name = next(name for cut in cuts if (name := steps[cut].tied))
        raise tracing.cant_be_cut(
            f"{name} would be in two of {num_stages} stages",
            "make them two tensors (gpt: model.args: {tie_embeddings: false}), or write another "
            "parallel.strategy, like fsdp",
        )
    raise tracing.cant_be_cut(
        f"values other than tensors pass between too many of its blocks for {num_stages} stages"
    )


def _best(steps: Sequence[Step], num_stages: int, *, are_tied_kept: bool) -> tuple[int, ...] | None:
    start, end = Step(0, 0, 0, None), steps[-1]
    places = _candidates(steps[:-1], are_tied_kept=are_tied_kept)
    reached: dict[int, _Cuts] = {-1: (0, 0, ())}
    for _ in range(num_stages - 1):
        reached = {
            place: min(ways)
            for place in places
            if (ways := _ways(reached, steps, start, place, steps[place]))
        }
    ways = _ways(reached, steps, start, len(steps) - 1, end)
    return min(ways)[2][:-1] if ways else None


def _ways(
    reached: dict[int, _Cuts], steps: Sequence[Step], start: Step, place: int, step: Step
) -> list[_Cuts]:
    """Extend each partial solution by one more stage, which ends at ``place``, if that stage has a block."""
    ways: list[_Cuts] = []
    for before, (most, costs, cuts) in reached.items():
        last = steps[before] if before >= 0 else start
        if before < place and last.num_blocks < step.num_blocks:
            size = step.num_parameters - last.num_parameters
            ways.append((max(most, size), costs + (step.num_passing or 0), (*cuts, place)))
    return ways


def _candidates(steps: Sequence[Step], *, are_tied_kept: bool) -> list[int]:
    """Return for each division of the parameters the first cut with the fewest crossing values."""
    best: dict[tuple[int, int], tuple[int, int]] = {}
    for place, step in enumerate(steps):
        if step.num_passing is None or (are_tied_kept and step.tied):
            continue
        key = step.num_parameters, step.num_blocks
        best[key] = min(best.get(key, (step.num_passing, place)), (step.num_passing, place))
    return [place for _, place in best.values()]
