# ruff: noqa: N803, N806  (shape suffixes)
"""``gpt``: a decoder-only transformer like GPT-2 (Radford et al. 2019, Language Models are Unsupervised
Multitask Learners), with pre-norm and learned positions.

Queries, keys and values have one linear layer each, so that tensor parallelism can split them by heads.

Legend: B sequences, T tokens, D width, H heads, K width of a head, V size of the vocabulary.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from pydantic import Field, ValidationError
from torch import Tensor, nn
from torch.nn import functional

from hpc_train.config.fields import PositiveInt, Section
from hpc_train.config.training_sections import ModelConfig
from hpc_train.datasets.types import DataInfo
from hpc_train.errors import BadFileError
from hpc_train.models.arguments import unknown_argument
from hpc_train.models.weights import load_weights
from hpc_train.validate.data_rules import needs_tokens
from hpc_train.validate.part_rules import rest_not_taken

_STD = 0.02


class GPTArgs(Section):
    """``model.args`` of gpt."""

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


class Attention(nn.Module):
    """Causal self-attention of ``num_heads`` heads."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.dropout = dropout
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim) for _ in range(4))

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
        return {"wq": "columns", "wk": "columns", "wv": "columns", "wo": "rows"}


class MLP(nn.Module):
    """Two linear layers with four times the width in between."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out_BTD: Tensor = self.down(functional.gelu(self.up(x_BTD), approximate="tanh"))
        return out_BTD

    def tensor_plan(self) -> dict[str, str]:
        return {"up": "columns", "down": "rows"}


class Block(nn.Module):
    """Attention, then the MLP, each with a residual connection."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads, dropout)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = MLP(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        out_BTD: Tensor = x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))
        return out_BTD


class GPT(nn.Module):
    """Tokens (B, T) int64, T at most ``sequence_length`` → logits (B, T, V)."""

    def __init__(self, vocabulary_size: int, sequence_length: int, args: GPTArgs) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary_size, args.dim)
        self.position_embedding = nn.Embedding(sequence_length, args.dim)
        self.dropout = nn.Dropout(args.dropout)
        self.layers = nn.ModuleList(
            Block(args.dim, args.num_heads, args.dropout) for _ in range(args.num_layers)
        )
        self.norm = nn.LayerNorm(args.dim)
        self.head = nn.Linear(args.dim, vocabulary_size, bias=False)
        self._initialise(args.num_layers)
        if args.tie_embeddings:
            self.head.weight = self.token_embedding.weight

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.logits(x_BTD)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return the input of the first block, (B, T, D)."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD: Tensor = self.dropout(self.token_embedding(tokens_BT) + self.position_embedding(positions_T))
        return x_BTD

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Return the logits (B, T, V) from the last block's output."""
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV

    def _initialise(self, num_layers: int) -> None:
        """Initialize weights like GPT-2: layers that add to the residual stream are scaled by 1/√(their
        number).
        """
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
    args = _parse(config)
    if args.num_classes is not None and args.num_classes < info.num_classes:
        raise BadFileError(
            f"model.args.num_classes: {args.num_classes} is less than the {info.num_classes} tokens of the "
            "data; take it out, or write as many"
        )
    model = GPT(args.num_classes or info.num_classes, info.sequence_length, args)
    if isinstance(config.pretrained, str):
        load_weights(model, config.pretrained)
    return model


def _parse(config: ModelConfig) -> GPTArgs:
    try:
        args = GPTArgs.model_validate(config.args)
    except ValidationError as error:
        raise _mistake(config, error) from error
    if args.dim % args.num_heads:
        below = args.dim // args.num_heads * args.num_heads
        raise BadFileError(
            f"model.args.dim: {args.dim} is not a multiple of num_heads {args.num_heads}; "
            f"write {below + args.num_heads}"
        )
    return args


def _mistake(config: ModelConfig, error: ValidationError) -> BadFileError:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return unknown_argument(config, key, GPTArgs.model_fields)
    return BadFileError(f"model.args.{key}: {first['msg']}; it is {first['input']!r}; fix or omit it")
