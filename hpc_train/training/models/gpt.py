# ruff: noqa: N803, N806  (shape suffixes)
"""``gpt``: a decoder-only transformer with pre-norm, in one of two styles.

``gpt2`` (Radford et al. 2019, Language Models are Unsupervised Multitask Learners): learned positions,
LayerNorm, GELU. ``llama`` (arXiv:2302.13971, arXiv:2307.09288): rotary positions (RoPE), RMSNorm, SwiGLU,
grouped-query attention, no biases; its layers compute the same as transformers' ``LlamaForCausalLM``.

Queries, keys and values have one linear layer each, so that tensor parallelism can split them by heads.

Legend: B sequences, T tokens, D width, H heads, K width of a head, V size of the vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.experiment.validate.model_rules import GPTArgs, default_hidden_dim, gpt_args_problems
from hpc_train.experiment.validate.part_rules import rest_not_taken
from hpc_train.experiment.validate.task_rules import needs_tokens
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.models.weights import load_weights

_STD = 0.02


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, args: GPTArgs) -> None:
        super().__init__()
        self.num_heads = args.num_heads
        self.head_dim = args.dim // args.num_heads
        self.dropout = args.dropout
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(args.dim, args.dim) for _ in range(4))

    @override
    def forward(self, x_BTD: Tensor) -> Tensor:
        # The number of heads follows from the rank's share of the width.
        q_BHTK, k_BHTK, v_BHTK = (
            layer(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        dropout = self.dropout if self.training else 0.0
        mixed_BHTK = functional.scaled_dot_product_attention(
            q_BHTK, k_BHTK, v_BHTK, dropout_p=dropout, is_causal=True
        )
        out_BTD: Tensor = self.wo(mixed_BHTK.transpose(1, 2).flatten(2))
        return out_BTD

    def tensor_plan(self) -> dict[str, str]:
        """Split the heads over ranks: queries, keys and values by columns, the output by rows."""
        return {"wq": "columns", "wk": "columns", "wv": "columns", "wo": "rows"}


class MLP(nn.Module):
    """Two linear layers with four times the width in between."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    @override
    def forward(self, x_BTD: Tensor) -> Tensor:
        out_BTD: Tensor = self.down(functional.gelu(self.up(x_BTD), approximate="tanh"))
        return out_BTD

    def tensor_plan(self) -> dict[str, str]:
        """Split the inner width over ranks."""
        return {"up": "columns", "down": "rows"}


class RotaryAttention(nn.Module):
    """Causal self-attention with rotary positions; groups of heads share keys and values."""

    def __init__(self, args: GPTArgs) -> None:
        super().__init__()
        self.num_heads = args.num_heads
        self.num_kv_heads = args.num_kv_heads or args.num_heads
        self.head_dim = args.dim // args.num_heads
        self.theta = args.rope_theta
        self.dropout = args.dropout
        kv_dim = self.num_kv_heads * self.head_dim
        self.wq = nn.Linear(args.dim, args.dim, bias=False)
        self.wk = nn.Linear(args.dim, kv_dim, bias=False)
        self.wv = nn.Linear(args.dim, kv_dim, bias=False)
        self.wo = nn.Linear(args.dim, args.dim, bias=False)

    @override
    def forward(self, x_BTD: Tensor) -> Tensor:
        # As in Attention, a rank may have only some of the heads.
        q_BHTK, k_BHTK, v_BHTK = (
            layer(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        cos_TK, sin_TK = rotary_table(q_BHTK, self.theta)
        mixed_BHTK = functional.scaled_dot_product_attention(
            rotated(q_BHTK, cos_TK, sin_TK),
            rotated(k_BHTK, cos_TK, sin_TK),
            v_BHTK,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.num_kv_heads != self.num_heads,
        )
        out_BTD: Tensor = self.wo(mixed_BHTK.transpose(1, 2).flatten(2))
        return out_BTD

    def tensor_plan(self) -> dict[str, str]:
        """Split the heads over ranks as in ``Attention``, including the key and value heads."""
        return {"wq": "columns", "wk": "columns", "wv": "columns", "wo": "rows"}


def rotary_table(heads_BHTK: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angles t·θ^(−2i/K), (T, K) each: both halves of K have the same angles.

    In float32, or float64 for such heads. Computed in each block: a table as a buffer would have to pass from
    stage to stage of a pipeline, or be in each checkpoint.
    """
    length, width = heads_BHTK.shape[-2:]
    dtype = torch.float64 if heads_BHTK.dtype == torch.float64 else torch.float32
    pairs = torch.arange(0, width, 2, device=heads_BHTK.device, dtype=dtype)
    places_T = torch.arange(length, device=heads_BHTK.device, dtype=dtype)
    angles_TK = torch.outer(places_T, theta ** (-pairs / width)).repeat(1, 2)
    return angles_TK.cos(), angles_TK.sin()


def rotated(heads_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotate the pair (i, i + K/2) of each head by its angle (RoPE, arXiv:2104.09864); same dtype."""
    first, second = heads_BHTK.chunk(2, dim=-1)
    turned_BHTK = torch.cat((-second, first), dim=-1)
    return (heads_BHTK * cos_TK + turned_BHTK * sin_TK).type_as(heads_BHTK)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)), arXiv:2002.05202."""

    def __init__(self, args: GPTArgs) -> None:
        super().__init__()
        hidden_dim = args.hidden_dim or default_hidden_dim(args.dim)
        self.gate = nn.Linear(args.dim, hidden_dim, bias=False)
        self.up = nn.Linear(args.dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, args.dim, bias=False)

    @override
    def forward(self, x_BTD: Tensor) -> Tensor:
        out_BTD: Tensor = self.down(functional.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return out_BTD

    def tensor_plan(self) -> dict[str, str]:
        """Split the inner width over ranks."""
        return {"gate": "columns", "up": "columns", "down": "rows"}


class Block(nn.Module):
    """Attention, then the MLP, each with a residual connection."""

    def __init__(self, args: GPTArgs) -> None:
        super().__init__()
        self.attention_norm = _norm(args)
        self.attention = RotaryAttention(args) if args.style == "llama" else Attention(args)
        self.mlp_norm = _norm(args)
        self.mlp = SwiGLU(args) if args.style == "llama" else MLP(args.dim)
        self.dropout = nn.Dropout(args.dropout)

    @override
    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        out_BTD: Tensor = x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))
        return out_BTD


def _norm(args: GPTArgs) -> nn.Module:
    return nn.RMSNorm(args.dim, eps=args.norm_eps) if args.style == "llama" else nn.LayerNorm(args.dim)


class GPT(nn.Module):
    """Tokens (B, T) int64, T at most ``sequence_length`` → logits (B, T, V)."""

    def __init__(self, vocabulary_size: int, sequence_length: int, args: GPTArgs) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary_size, args.dim)
        has_rope = args.style == "llama"
        self.position_embedding = None if has_rope else nn.Embedding(sequence_length, args.dim)
        self.dropout = nn.Dropout(args.dropout)
        self.layers = nn.ModuleList(Block(args) for _ in range(args.num_layers))
        self.norm = _norm(args)
        self.head = nn.Linear(args.dim, vocabulary_size, bias=False)
        self._initialise(args.num_layers)
        if args.tie_embeddings:
            self.head.weight = self.token_embedding.weight

    def blocks(self) -> list[nn.Module]:
        """Return the units that are compiled, sharded and checkpointed one by one (``models.blocks``)."""
        return list(self.layers)

    @override
    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.logits(x_BTD)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return the input of the first block, (B, T, D)."""
        if self.position_embedding is None:
            return self.dropout(self.token_embedding(tokens_BT))
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD: Tensor = self.dropout(self.token_embedding(tokens_BT) + self.position_embedding(positions_T))
        return x_BTD

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Return the logits (B, T, V) from the last block's output."""
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV

    def _initialise(self, num_layers: int) -> None:
        """Initialize like GPT-2: layers that add to the residual stream are scaled by 1/√(their number)."""
        added_std = _STD / math.sqrt(2 * num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                is_added = name.endswith((".wo", ".down"))
                nn.init.normal_(module.weight, std=added_std if is_added else _STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def build(rest: str, config: ModelConfig, info: DataInfo, *, download: bool) -> nn.Module:
    """Build the model for the data's vocabulary and sequence length."""
    if problem := rest_not_taken(("model", "name"), config.name):
        raise problem.as_error()
    if info.sequence_length is None:
        raise needs_tokens(config.name, "this data set").as_error()
    if config.pretrained is True:
        raise BadFileError("model.pretrained: gpt has no weights on a hub; write false, or a path")
    if problems := gpt_args_problems(config.args):
        raise BadFileError([str(problem) for problem in problems])
    args = GPTArgs.model_validate(config.args)
    if args.num_classes is not None and args.num_classes < info.num_classes:
        raise BadFileError(
            f"model.args.num_classes: {args.num_classes} is less than the {info.num_classes} tokens of the "
            "data; take it out, or write as many"
        )
    model = GPT(args.num_classes or info.num_classes, info.sequence_length, args)
    if isinstance(config.pretrained, str):
        load_weights(model, config.pretrained)
    return model
