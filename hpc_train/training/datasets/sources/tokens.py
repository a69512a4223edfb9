# ruff: noqa: N803, N806  (shape suffixes)
"""``tokens``: sequences of token shards that ``prepare`` wrote, or of nanoGPT's and llm.c's files.

The shards of a split are one long stream of documents, each followed by its end-of-document token. Sample i
is tokens [iT, iT + T) with targets [iT + 1, iT + T + 1), regardless of the ends of shards and documents:
every token but the first is a target once, and an incomplete sequence at the end is dropped.

Shards are read by ``pread``, not mapped: a mapped file that is truncated or can't be read kills the process
instead of raising an error, and mapped pages would count as the rank's memory.

Legend: B sequences, T tokens of a sequence.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc_train.console import say
from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts import data_size, token_shards
from hpc_train.experiment.data_facts.raw_tokens import Shard
from hpc_train.training.datasets import token_check, token_writing, tokenization
from hpc_train.training.datasets.base import DataSource, parse_args, refuse_rest, root_of
from hpc_train.training.datasets.types import DataInfo

#: Maximum number of open shards: a rank may open few files, and shuffled samples come from all shards.
_MAX_OPEN = 64
_CHECKED_AT_ONCE = 1 << 22


class OpenShards:
    """Descriptors of shards: opened on demand; the most recently used ones stay open."""

    def __init__(self) -> None:
        self._descriptors: OrderedDict[Path, int] = OrderedDict()

    def descriptor(self, path: Path) -> int:
        """Return the open file. Raises OSError."""
        descriptor = self._descriptors.get(path)
        if descriptor is None:
            while len(self._descriptors) >= _MAX_OPEN:
                os.close(self._descriptors.popitem(last=False)[1])
            descriptor = self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        else:
            self._descriptors.move_to_end(path)
        return descriptor

    def __len__(self) -> int:
        return len(self._descriptors)

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenShards, ()  # a loader process opens its own


class TokenSplit:
    """Sequences of ``sequence_length`` tokens of one split. Sample i: inputs and targets (T,)."""

    def __init__(self, shards: token_shards.TokenShards, part: str, sequence_length: int) -> None:
        self._shards = shards.parts[part]
        self._ends = list(accumulate(shard.num_tokens for shard in self._shards))
        self.dtype = np.dtype(shards.dtype).newbyteorder("<")
        self.vocabulary_size = vocabulary_size = shards.vocabulary_size
        # Nothing to check in a batch if every number of the dtype is a token.
        self._checks = vocabulary_size < 1 << (8 * self.dtype.itemsize)
        self._sequence_length = sequence_length
        self._open = OpenShards()

    def __len__(self) -> int:
        return data_size.num_sequences(self._ends[-1] if self._ends else 0, self._sequence_length)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both (B, T) int64.

        Raises BadFileError for a token beyond the vocabulary, DamagedShardError for a shard that is too
        short.
        """
        length = self._sequence_length
        rows_BT = np.empty((len(indices), length + 1), self.dtype)
        starts = [index * length for index in indices.tolist()]
        for row_T, start in zip(rows_BT, starts, strict=True):
            self._read(row_T, start)
        if self._checks and int(rows_BT.max(initial=0)) >= self.vocabulary_size:
            self._refuse(rows_BT, starts)
        tokens_BT = torch.from_numpy(rows_BT.astype(np.int64))
        return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()

    def check(self, passages: token_check.Passages | None = None) -> int:
        """Read all tokens, and return the largest. Looks for ``passages`` in them.

        Raises BadFileError for the first token beyond the vocabulary.
        """
        num_tokens, largest = self._ends[-1], 0
        for start in range(0, num_tokens, _CHECKED_AT_ONCE):
            row_T = np.empty(min(_CHECKED_AT_ONCE, num_tokens - start), self.dtype)
            self._read(row_T, start)
            largest = max(largest, int(row_T.max()))
            if largest >= self.vocabulary_size:
                self._refuse(row_T[None], [start])
            if passages:
                passages.look_in(row_T)
        return largest

    def _place(self, token: int) -> tuple[Shard, int]:
        """Return the shard of a token of the stream, and the token's number within that shard."""
        number = bisect_right(self._ends, token)
        return self._shards[number], token - (self._ends[number - 1] if number else 0)

    def _read(self, row_T: np.ndarray[Any, Any], start: int) -> None:
        done = 0
        while done < len(row_T):
            shard, first = self._place(start + done)
            count = min(len(row_T) - done, shard.num_tokens - first)
            self._fill(row_T[done : done + count].data.cast("B"), shard, first)
            done += count

    def _fill(self, place: memoryview, shard: Shard, first: int) -> None:
        descriptor = self._open.descriptor(shard.path)
        offset = shard.offset + first * self.dtype.itemsize
        while place:
            count = os.preadv(descriptor, [place], offset)
            if count == 0:
                raise token_shards.DamagedShardError.of(
                    shard.path, f"it ends at byte {os.fstat(descriptor).st_size}"
                )
            place, offset = place[count:], offset + count

    def _refuse(self, rows_BT: np.ndarray[Any, Any], starts: Sequence[int]) -> None:
        row, column = np.argwhere(rows_BT >= self.vocabulary_size)[0].tolist()
        shard, number = self._place(starts[row] + column)
        raise BadFileError(
            f"data.root: {shard.path} has the token {int(rows_BT[row, column])} at place {number} (byte "
            f"{shard.offset + number * self.dtype.itemsize}), and the vocabulary has "
            f"{self.vocabulary_size}; write the tokenizer or vocabulary_size of that file, or write it again"
        )


def build(rest: str, config: DataConfig, *, download: bool) -> DataSource:
    """Return the sequences of the training and, if there are any, the validation tokens.

    With ``download`` (``prepare``) shards of the text are written first.
    """
    refuse_rest(config)
    args = parse_args(token_shards.TokensArgs, config)
    if download:
        token_writing.ensure(config, args)
    shards = token_shards.find_shards(config, args)
    splits = {part: _split(shards, part, args.sequence_length) for part in shards.parts}
    for part in splits if download else ():
        if unused := data_size.unused_tokens(part, shards.num_tokens(part), args.sequence_length):
            say(f"data.root: {root_of(config)}: {unused}")
    if download and shards.folder is None:
        _check_raw(splits, args, root_of(config))
    return DataSource(
        splits["train"], splits.get("val"), _info(shards, args), partial(token_check.check_before_use, shards)
    )


def _check_raw(splits: dict[str, TokenSplit], args: token_shards.TokensArgs, root: Path) -> None:
    """Read all tokens of other programs' files, and print what is unusual about them."""
    val = splits.get("val")
    passages = None if val is None else token_check.Passages(val, splits["train"].dtype)
    largest = max(splits["train"].check(passages), 0 if val is None else val.check())
    if passages is not None:
        passages.report(root)
    size = splits["train"].vocabulary_size
    if args.vocabulary_size is None and largest < size // 2:
        say(
            f"data.root: {root}: the largest token is {largest}, and tokenizer {args.tokenizer} has {size} "
            "tokens; if the files are of another tokenizer, write its data.args.vocabulary_size"
        )


def _info(shards: token_shards.TokenShards, args: token_shards.TokensArgs) -> DataInfo:
    names = () if shards.characters is None else (*shards.characters, "")  # the last: end of a document
    return DataInfo(
        num_classes=shards.vocabulary_size,
        channels=0,
        mean=(),
        std=(),
        class_names=names,
        sequence_length=args.sequence_length,
        tokenizer=_decoding(shards, args),
    )


def _decoding(shards: token_shards.TokenShards, args: token_shards.TokensArgs) -> str:
    """Return ``DataInfo.tokenizer``."""
    if shards.folder is None or shards.tokenizer in ("bytes", "characters"):
        return shards.tokenizer
    has_file = token_shards.tokenizer_file(args) is not None
    return f"{shards.folder}/{tokenization.TOKENIZER if has_file else tokenization.VOCABULARY}"


def _split(shards: token_shards.TokenShards, part: str, sequence_length: int) -> TokenSplit:
    split = TokenSplit(shards, part, sequence_length)
    if len(split) == 0:
        raise BadFileError(
            f"data.args.sequence_length: {part} has {shards.num_tokens(part)} tokens, and a sequence of "
            f"{sequence_length} needs one more than that; write a smaller number, or add text"
        )
    return split
