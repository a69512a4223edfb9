"""Gradient clipping if ranks own different parts of different tensors, on one mesh or several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.strategies.base import Piece, RankContext
from hpc_train.strategies.pieces import local_part

#: The value of ``torch.nn.utils.clip_grad_norm_``.
_EPS = 1e-6


@torch.no_grad()
def clip_over_ranks(
    parameters: Iterable[Tensor],
    pieces: Callable[[Tensor, Tensor], Sequence[Piece]],
    max_norm: float,
    context: RankContext,
) -> Tensor:
    """Scale gradients so that their L2 norm over all ranks is at most ``max_norm``.

    ``parameters``: the parameters of which this rank has a part, none on some ranks; ``pieces``:
    ``Strategy.pieces``, by which each part counts once. Collective: one all-reduce over all ranks. Returns
    the norm before clipping, shape (), in the parameters' dtype, bitwise identical on all ranks. Non-finite
    norms are returned, not raised.
    """
    trained = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    counted = [
        piece.local for like, gradient in trained for piece in pieces(gradient, like) if piece.is_writer
    ]
    squares = torch.zeros((), dtype=torch.float64, device=context.device)
    if counted:
        # In float64 the square of a float32 norm can't overflow.
        squares += torch.stack(torch._foreach_norm(counted)).double().square().sum()
    if context.world_size > 1:
        dist.all_reduce(squares)
    norm = squares.sqrt().to(context.precision.param_dtype)
    scale = torch.clamp(max_norm / (norm + _EPS), max=1.0)
    if trained:
        torch._foreach_mul_([local_part(gradient) for _, gradient in trained], scale)
    return norm
