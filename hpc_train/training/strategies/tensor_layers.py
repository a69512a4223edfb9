"""Finds the linear layers that ranks can share by columns and rows.

By class in timm and torchvision; in plug-ins and gpt, by a method of the module's class

    def tensor_plan(self) -> dict[str, str]:
        return {"up": "columns", "down": "rows"}

submodule → "columns" for linear layers whose inputs are whole on all ranks, "rows" for layers that take the
results of these. The modules between have no weights, treat columns (or heads) alike, and read their number
from the tensors; ``num_heads`` and ``num_kv_heads``, if the module has them, become the numbers per rank.

Not shared: attention whose norms have weights (a rank would compute only its heads' part of their gradient),
MLPs with a norm between their layers (it needs all columns), and convolutions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from hpc_train.errors import BadFileError

#: Attributes that are numbers of heads, which are divided by the number of ranks.
_HEADS = ("num_heads", "num_kv_heads")


@dataclass(frozen=True)
class Shareable:
    """The layers of one module that ranks can share."""

    module: nn.Module
    #: Linear layer → the number of tensors in its rows, each shared separately: 3 for q, k and v in one.
    columns: Mapping[str, int]
    rows: tuple[str, ...]
    #: Attributes of the module that are numbers of heads.
    heads: tuple[str, ...] = ()
    #: Attributes of the module that are widths.
    widths: tuple[str, ...] = ()
    #: Dropouts between columns and rows.
    dropouts: tuple[str, ...] = ()
    #: Dropout rate of attention weights, and its key in the file.
    attention_dropout: float = 0.0
    attention_key: str = "model.args.dropout"

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the linear layers within the module."""
        return (*self.columns, *self.rows)

    def linear(self, name: str) -> nn.Linear:
        """Return the layer with this name within the module."""
        layer = self.module.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        return layer


def find_shareable(module: nn.Module) -> Shareable | None:
    """Return the shareable layers of ``module`` itself, if any.

    Raises BadFileError if its ``tensor_plan`` is wrong.
    """
    kind = type(module)
    if callable(getattr(kind, "tensor_plan", None)):
        return _declared(module)
    find = _FINDERS.get(f"{kind.__module__}.{kind.__qualname__}")
    shareable = find(module) if find is not None else None
    # A subclass of Linear, or a convolution, has a different computation.
    is_linear = shareable is not None and all(
        type(module.get_submodule(name)) is nn.Linear for name in shareable.layers
    )
    return shareable if is_linear else None


def shareable_in(model: nn.Module, within: nn.Module | None = None) -> dict[str, Shareable]:
    """Return the shareable layers of ``model``, or of a stage of ``within``, by module name."""
    by_module = dict(_shareable(model))
    if any(type(module).__name__ == "RotaryEmbeddingMixed" for module in (within or model).modules()):
        # timm's embedding has different angles per head, of which attention would need this rank's heads.
        return {name: shareable for name, shareable in by_module.items() if not shareable.heads}
    return by_module


def _shareable(model: nn.Module) -> Iterator[tuple[str, Shareable]]:
    """Yield module names with their shareable layers, each layer once."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    taken: set[nn.Module] = set()
    for name, module in model.named_modules():
        shareable = find_shareable(module)
        if shareable is None:
            continue
        layers = {shareable.linear(layer) for layer in shareable.layers}
        is_tied = any(uses[id(parameter)] > 1 for layer in layers for parameter in layer.parameters())
        if not is_tied and not layers & taken:
            taken |= layers
            yield name, shareable


def numbers_shared(by_module: Mapping[str, Shareable]) -> dict[str, int]:
    """Return the numbers that tensor ranks must divide, by description (``heads of blocks.0.attn``)."""
    return {
        label: number for name, shareable in by_module.items() for label, number in _numbers(name, shareable)
    }


def _numbers(name: str, shareable: Shareable) -> Iterator[tuple[str, int]]:
    """Yield labels and numbers, heads first: they are clearer than the columns that form them."""
    for attribute in shareable.heads:
        yield f"heads of {name} ({attribute})", getattr(shareable.module, attribute)
    for layer, parts in shareable.columns.items():
        yield f"columns of {name}.{layer}", shareable.linear(layer).out_features // parts
    for layer in shareable.rows:
        yield f"rows of {name}.{layer}", shareable.linear(layer).in_features


def _declared(module: nn.Module) -> Shareable:
    plan: dict[str, str] = module.tensor_plan()  # type: ignore[operator]
    where = f"model.name: {type(module).__name__}.tensor_plan()"
    held = dict(module.named_modules())
    for name, how in plan.items():
        if how not in ("columns", "rows", "dropout", "whole"):
            raise BadFileError(f"{where} says {how!r} of {name}; write columns, rows, dropout or whole")
        wanted = nn.Linear if how in ("columns", "rows") else nn.Dropout
        if type(held.get(name)) is not wanted:
            raise BadFileError(f"{where} names {name}, which is no nn.{wanted.__name__} of it; take it out")
    for name, inner in held.items():
        if isinstance(inner, nn.Dropout) and inner.p > 0 and name not in plan:
            raise BadFileError(
                f"{where} does not name {name}, a dropout; write dropout where it is between columns and "
                "rows, whole where it does not"
            )
    dropout = getattr(module, "dropout", 0.0)
    return Shareable(
        module,
        {name: 1 for name, how in plan.items() if how == "columns"},
        tuple(name for name, how in plan.items() if how == "rows"),
        dropouts=tuple(name for name, how in plan.items() if how == "dropout"),
        heads=tuple(name for name in _HEADS if isinstance(getattr(module, name, None), int)),
        attention_dropout=dropout if isinstance(dropout, float) else 0.0,
    )


def _timm_attention(module: nn.Module) -> Shareable | None:
    # Older versions compute with the width of their input.
    if not hasattr(module, "attn_dim") or _has_weights(module, "q_norm", "k_norm", "norm"):
        return None
    columns = {"qkv": 3, "q_proj": 1, "k_proj": 1, "v_proj": 1, "gate": 1}
    return Shareable(
        module,
        {name: parts for name, parts in columns.items() if getattr(module, name, None) is not None},
        ("proj",),
        heads=tuple(name for name in _HEADS if hasattr(module, name)),
        widths=tuple(name for name in ("attn_dim", "kv_dim") if hasattr(module, name)),
        attention_dropout=module.get_submodule("attn_drop").p,  # type: ignore[arg-type]
        attention_key="model.args.attn_drop_rate",
    )


def _timm_mlp(columns: Mapping[str, int]) -> Callable[[nn.Module], Shareable | None]:
    def find(module: nn.Module) -> Shareable | None:
        if not isinstance(module.norm, nn.Identity):
            return None
        return Shareable(module, columns, ("fc2",), dropouts=("drop1",))

    return find


def _torchvision_mlp(module: nn.Module) -> Shareable | None:
    kinds = [type(child) for child in module.children()]
    is_pair = len(kinds) == 5 and (kinds[0], kinds[2], kinds[3]) == (nn.Linear, nn.Dropout, nn.Linear)
    return Shareable(module, {"0": 1}, ("3",), dropouts=("2",)) if is_pair else None


def _has_weights(module: nn.Module, *names: str) -> bool:
    norms = (getattr(module, name, None) for name in names)
    return any(isinstance(norm, nn.Module) and any(True for _ in norm.parameters()) for norm in norms)


#: By the class's full name, so that timm and torchvision are imported only if a model uses them.
_FINDERS: dict[str, Callable[[nn.Module], Shareable | None]] = {
    "timm.layers.attention.Attention": _timm_attention,
    "timm.layers.attention.AttentionRope": _timm_attention,
    "timm.layers.mlp.Mlp": _timm_mlp({"fc1": 1}),
    "timm.layers.mlp.GluMlp": _timm_mlp({"fc1": 2}),
    "timm.layers.mlp.SwiGLU": _timm_mlp({"fc1_g": 1, "fc1_x": 1}),
    "torchvision.ops.misc.MLP": _torchvision_mlp,
    "torchvision.models.vision_transformer.MLPBlock": _torchvision_mlp,
}
