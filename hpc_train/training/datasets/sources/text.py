"""``text``: a text file, or a folder of ``train.txt`` and ``val.txt``, cut into sequences of equal length.

For tokens t₀ t₁ t₂ … and T = 2, sample 0 is (t₀ t₁) with targets (t₁ t₂), sample 1 is (t₂ t₃) with targets
(t₃ t₄): every token except the first is a target once. An incomplete sequence at the end is dropped.

Legend: B sequences, T tokens of a sequence.
"""

from __future__ import annotations

import sys
from codecs import BOM_UTF8
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc_train.console import say
from hpc_train.errors import BadFileError, counted, listed
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.data_size import (
    TextArgs,
    num_sequences,
    train_file,
    unused_tokens,
    val_tokens,
)
from hpc_train.experiment.data_facts.root_layout import unread_texts, why_not_read
from hpc_train.training.datasets.base import DataSource, parse_args, refuse_rest, root_of
from hpc_train.training.datasets.token_check import Passages
from hpc_train.training.datasets.types import DataInfo

_NUM_BYTES = 256
_COMPARED_AT_ONCE = 1 << 24
#: Characters by number, or bytes.
_Codes = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TextSplit:
    """Sequences of ``tokens`` (L,), of any integer type. Sample i: inputs and targets (T,)."""

    tokens: Tensor
    sequence_length: int

    def __len__(self) -> int:
        return num_sequences(len(self.tokens), self.sequence_length)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both (B, T) int64."""
        windows = self.tokens.unfold(0, self.sequence_length + 1, self.sequence_length)  # a view
        chosen = windows.index_select(0, indices).to(torch.int64)
        return chosen[:, :-1].contiguous(), chosen[:, 1:].contiguous()

    def extremes(self) -> Tensor:
        """Return two targets, (2, T) int64: one of the lowest token, one of the highest."""
        lowest_and_highest = torch.stack(self.tokens.aminmax()).to(torch.int64)
        return lowest_and_highest[:, None].expand(-1, self.sequence_length)


def build(rest: str, config: DataConfig, *, download: bool) -> DataSource:
    """Return the sequences of the training and, if there is any, the validation text."""
    refuse_rest(config)
    args = parse_args(TextArgs, config)
    root = root_of(config)
    if download and root.is_dir():
        _report_unread(root)
    train, val = _parts(root, args)
    vocabulary = _vocabulary(train, val) if args.tokens == "characters" else list(range(_NUM_BYTES))
    info = DataInfo(
        num_classes=len(vocabulary),
        channels=0,
        mean=(),
        std=(),
        class_names=tuple(map(chr, vocabulary)) if args.tokens == "characters" else (),
        sequence_length=args.sequence_length,
    )
    train_split = _split("training", train, vocabulary, args)
    val_split = None if val is None else _split("validation", val, vocabulary, args)
    for part, codes in (("training", train), ("validation", val)) if download else ():
        if codes is not None and (unused := unused_tokens(part, len(codes), args.sequence_length)):
            say(f"data.root: {root}: {unused}")
    if download and val_split is not None and root.is_dir():
        _report_shared(train_split, val_split, root)
    return DataSource(train_split, val_split, info)


def _report_shared(train: TextSplit, val: TextSplit, root: Path) -> None:
    tokens = train.tokens.numpy()
    passages = Passages(val, tokens.dtype)
    for start in range(0, len(tokens), _COMPARED_AT_ONCE):
        passages.look_in(tokens[start : start + _COMPARED_AT_ONCE])
    passages.report(root)


def _report_unread(root: Path) -> None:
    unread = unread_texts(root, {train_file(root), root / "val.txt"})
    if unread:
        files = f"{counted(len(unread), 'file')} in {root} not read ({listed(unread, 5)})"
        say(f"data.root: {files}: text reads train.txt and val.txt; data.name: tokens reads several files")


def _parts(root: Path, args: TextArgs) -> tuple[_Codes, _Codes | None]:
    codes = _read(train_file(root), args)
    if not root.is_dir():
        cut = len(codes) - val_tokens(len(codes), args)
        return codes[:cut], codes[cut:] if cut < len(codes) else None
    if args.val_fraction is not None:
        raise BadFileError(
            f"data.args.val_fraction: {root} is a folder, whose val.txt is for validation; take it out"
        )
    val = root / "val.txt"
    return codes, _read(val, args) if val.exists() else None


def _read(path: Path, args: TextArgs) -> _Codes:
    """Return the characters or bytes of a file, without a byte order mark."""
    if (why := why_not_read(path)) is not None:
        raise BadFileError(f"data.root: {path} {why}; put the text itself there, or remove it")
    try:
        if args.tokens == "bytes":
            content = np.fromfile(path, np.uint8)
            return content[len(BOM_UTF8) :] if content[: len(BOM_UTF8)].tobytes() == BOM_UTF8 else content
        # Decoded from bytes, so that line ends are kept.
        text = path.read_bytes().decode("utf-8-sig")
        codes: _Codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        if not codes.all():
            raise BadFileError(
                f"data.root: {path} has a NUL character (number {int(codes.argmin())}), like UTF-16 or "
                "damaged text; convert it to UTF-8, or write data.args: {tokens: bytes}"
            )
        return codes
    except PermissionError as error:
        raise BadFileError(f"data.root: {path} is not readable; change its mode, or fix the path") from error
    except UnicodeDecodeError as error:
        raise BadFileError(
            f"data.root: {path} is not UTF-8 text (at byte {error.start}); "
            "write data.args: {tokens: bytes}, or convert it"
        ) from error


def _vocabulary(train: _Codes, val: _Codes | None) -> list[int]:
    """Return training's characters, sorted, then those only in validation, so that no token is unknown.

    The numbers of training's tokens do not depend on the validation text.
    """
    in_train, in_val = (_seen(part) for part in (train, train[:0] if val is None else val))
    return [*np.flatnonzero(in_train).tolist(), *np.flatnonzero(in_val & ~in_train).tolist()]


def _seen(codes: _Codes) -> _Codes:
    seen = np.zeros(sys.maxunicode + 1, bool)
    seen[codes] = True
    return seen


def _numbered(codes: _Codes, vocabulary: list[int]) -> _Codes:
    number = np.zeros(max(vocabulary) + 1, np.uint8 if len(vocabulary) <= _NUM_BYTES else np.int32)
    number[vocabulary] = np.arange(len(vocabulary))
    return number[codes]


def _split(part: str, codes: _Codes, vocabulary: list[int], args: TextArgs) -> TextSplit:
    if num_sequences(len(codes), args.sequence_length) == 0:
        raise BadFileError(
            f"data.args.sequence_length: the {part} text has {len(codes)} {args.tokens}, and a sequence of "
            f"{args.sequence_length} needs one more than that; write a smaller number, or add text"
        )
    tokens = codes if args.tokens == "bytes" else _numbered(codes, vocabulary)
    return TextSplit(torch.from_numpy(tokens), args.sequence_length)
