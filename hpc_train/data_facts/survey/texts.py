"""Texts and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_train.config.training_sections import DataConfig
from hpc_train.data_facts.by_name import data_facts
from hpc_train.data_facts.survey.content import Survey, no_val
from hpc_train.errors import counted

#: Tokens per sequence, and what a short text has for validation.
_MAX_LENGTH, _MIN_LENGTH, _VAL_FRACTION, _MIN_VAL_SEQUENCES = 128, 16, 0.1, 4


def text(root: Path) -> Survey:
    """Return the content of a text file, or of a folder of train.txt."""
    has_val_file = root.is_dir() and (root / "val.txt").is_file()
    file = root / "train.txt" if root.is_dir() else root
    length = _MAX_LENGTH
    while length > _MIN_LENGTH and file.stat().st_size * _VAL_FRACTION < _MIN_VAL_SEQUENCES * length:
        length //= 2
    args = {"sequence_length": length} | ({} if has_val_file else {"val_fraction": _VAL_FRACTION})
    read = root if has_val_file else file
    samples = data_facts("text").num_samples(DataConfig(name="text", root=str(read), args=args))
    summary = "" if samples is None else f"{counted(samples, 'sequence')} of {length} characters for training"
    remark = "the last tenth of the text is for validation"
    return Survey(
        "causal_lm", "text", args, samples, True, summary, [] if has_val_file else [remark],
        root=None if read == root else read,
    )  # fmt: skip


def tokens(root: Path) -> Survey:
    """Return the content of a folder of texts to tokenize, or of files of tokens."""
    args: dict[str, Any] = {"sequence_length": _MAX_LENGTH}
    summary = "files of tokens, such as nanoGPT's"
    if has_text := any(path.suffix in (".jsonl", ".txt") for path in root.iterdir()):
        args["tokenizer"] = "bytes"
        summary = "a text, which `hpc-train prepare` tokenizes once"
    samples = data_facts("tokens").num_samples(DataConfig(name="tokens", root=str(root), args=args))
    if samples is not None:
        summary += f": {counted(samples, 'sequence')} of {_MAX_LENGTH} tokens for training"
    has_val = any(path.name.startswith("val") or "_val" in path.name for path in root.iterdir())
    reason = "tokenizer: gpt2 has shorter sequences, but needs hpc-train[lm]" if has_text else ""
    return Survey("causal_lm", "tokens", args, samples, has_val, summary, no_val(has_val), args_reason=reason)
