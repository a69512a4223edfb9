"""``model.args`` of ``gpt``: checked before a run is queued, without torch, and by the ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hpc_train.config import explanations
from hpc_train.config.fields import Arguments, PositiveInt, Section
from hpc_train.config.problems import KeyPath, Problem

_ARGS: KeyPath = ("model", "args")
#: Keys that style gpt2 does not read.
_OF_LLAMA = ("num_kv_heads", "hidden_dim", "rope_theta", "norm_eps")
#: The default hidden width of llama's MLP is a multiple of it.
_HIDDEN_MULTIPLE = 64


class GPTArgs(Section):
    """``model.args`` of gpt."""

    style: Literal["gpt2", "llama"] = "gpt2"
    """Architecture of the blocks: ``gpt2``, or ``llama``: RoPE, RMSNorm, SwiGLU, no biases."""
    num_layers: PositiveInt = 4
    """Number of blocks."""
    num_heads: PositiveInt = 4
    """Number of attention heads per block; must divide ``dim``."""
    dim: PositiveInt = 128
    """Width of the residual stream."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of embeddings, of attention weights, and of the output of each residual branch."""
    tie_embeddings: bool = True
    """Whether the head shares the weight of the token embedding."""
    num_classes: PositiveInt | None = None
    """V. Default: the data set's."""
    num_kv_heads: PositiveInt | None = None
    """Style llama: heads of keys and values, each shared by ``num_heads / num_kv_heads`` heads of queries;
    must divide ``num_heads``. Default: ``num_heads``."""
    hidden_dim: PositiveInt | None = None
    """Style llama: hidden width of the MLP. Default: 8/3 of ``dim``, rounded up to a multiple of 64."""
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    """Style llama: base of the rotary frequencies."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Style llama: added to the mean square in RMSNorm."""


def default_hidden_dim(dim: int) -> int:
    """Return the default of ``hidden_dim``: 8/3 of the width, rounded up."""
    return -(-8 * dim // (3 * _HIDDEN_MULTIPLE)) * _HIDDEN_MULTIPLE


def args_problems(args: Arguments) -> list[Problem]:
    """Return the problem with the arguments."""
    if problems := explanations.args_problems(_ARGS, "gpt", GPTArgs, args):
        return problems
    checked = GPTArgs.model_validate(args)
    if checked.dim % checked.num_heads:
        fitting = checked.dim // checked.num_heads * checked.num_heads + checked.num_heads
        message = f"{checked.dim} is not a multiple of num_heads {checked.num_heads}"
        return [Problem((*_ARGS, "dim"), message, f"write {fitting}")]
    problem = _problem_of_gpt2(checked) if checked.style == "gpt2" else _problem_of_llama(checked)
    return [] if problem is None else [problem]


def _problem_of_gpt2(args: GPTArgs) -> Problem | None:
    llama_key = next((key for key in _OF_LLAMA if key in args.model_fields_set), None)
    if llama_key is None:
        return None
    return Problem((*_ARGS, llama_key), "is for style llama", "write style: llama too, or take it out")


def _problem_of_llama(args: GPTArgs) -> Problem | None:
    heads, width = args.num_heads, args.dim // args.num_heads
    groups = args.num_kv_heads or heads
    if heads % groups:
        fitting = next(number for number in range(groups, 0, -1) if heads % number == 0)
        message = f"{groups} does not divide num_heads {heads}"
        return Problem((*_ARGS, "num_kv_heads"), message, f"write {fitting}")
    if width % 2:
        message = f"{args.dim} gives each of {heads} heads {width} dimensions, and RoPE rotates pairs of them"
        return Problem((*_ARGS, "dim"), message, f"write {args.dim + heads}")
    return None
