"""Text to tokens and back: bytes, characters, tiktoken's encodings, and files of the library tokenizers.

``prepare`` encodes; rank 0 decodes the samples of an evaluation.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from hpc_train.errors import BadFileError, counted, listed, shortened
from hpc_train.training.datasets.types import DataInfo

Tokens = np.ndarray[Any, Any]
#: Files beside the shards: the copy of the tokenizer's file; the bytes of each token, in base64.
TOKENIZER, VOCABULARY = "tokenizer.json", "vocabulary.json"
_NUM_BYTES = 256
#: Names of the end of a document in tokenizer.json files; the first one that a file has counts.
_ENDS = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[EOS]", "[SEP]",
)  # fmt: skip


class Tokenizer(Protocol):
    """Encodes whole documents."""

    vocabulary_size: int
    #: The token after each document.
    end_of_document: int

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text, without special tokens."""


class Bytes:
    """A token is a byte of UTF-8."""

    vocabulary_size = _NUM_BYTES + 1
    end_of_document = _NUM_BYTES

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the bytes of each text, uint8; ``prepare`` reads bytes that are not UTF-8 as surrogates."""
        return [np.frombuffer(text.encode(errors="surrogateescape"), np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text without ends of documents; bytes that are not UTF-8 become U+FFFD."""
        return bytes(token for token in tokens if token < _NUM_BYTES).decode(errors="replace")


class Characters:
    """A token is the number of a character in ``characters``."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.end_of_document = len(characters)
        self.vocabulary_size = len(characters) + 1
        codes = np.frombuffer(characters.encode("utf-32-le"), np.uint32)
        self._numbers = np.zeros(int(codes.max(initial=0)) + 1, np.uint32)
        self._numbers[codes] = np.arange(len(codes))

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the numbers of each text's characters, uint32; all must be in ``characters``."""
        return [self._numbers[np.frombuffer(text.encode("utf-32-le"), np.uint32)] for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text without ends of documents."""
        return "".join(self.characters[token] for token in tokens if token < len(self.characters))


class TikToken:
    """An encoding of tiktoken, which downloads its file at the first use: only in ``prepare``."""

    def __init__(self, name: str) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise _missing(name, "tiktoken") from error
        if name not in tiktoken.list_encoding_names():
            encodings = ", ".join(["bytes", "characters", *tiktoken.list_encoding_names()])
            raise BadFileError(
                f"data.args.tokenizer: {name!r} is unknown; write one of {encodings}, or a path"
            )
        try:
            self._encoding = tiktoken.get_encoding(name)
        except Exception as error:  # raised by requests, or for a damaged file in its cache
            raise BadFileError(
                f"data.args.tokenizer: tiktoken can't load {name}: {shortened(str(error), 300)}; run prepare "
                "with network access, or set TIKTOKEN_CACHE_DIR to a folder that has the file"
            ) from error
        self.vocabulary_size = self._encoding.n_vocab
        self.end_of_document = self._encoding.eot_token

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text, uint32; names of special tokens are encoded as text."""
        return [np.array(tokens, np.uint32) for tokens in self._encoding.encode_ordinary_batch(list(texts))]

    def vocabulary(self) -> list[str]:
        """Return the bytes of each token, in base64; empty for numbers that are not tokens."""
        return [base64.b64encode(self._bytes_of(token)).decode() for token in range(self.vocabulary_size)]

    def _bytes_of(self, token: int) -> bytes:
        try:
            return self._encoding.decode_single_token_bytes(token)
        except KeyError:
            return b""


class TokenizerFile:
    """A tokenizer.json, as transformers saves it."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise _missing(str(path), "tokenizers") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises the base class Exception
            raise BadFileError(
                f"data.args.tokenizer: {path} can't be read: {error}; write the path of a tokenizer.json"
            ) from error
        # The file may have been saved after a call with truncation or padding.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # BPE dropout skips merges at random; shards are written once, so all epochs would have the same ones.
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None
        # A document may contain the name of a special token, such as </s>.
        self._tokenizer.encode_special_tokens = True
        self.vocabulary_size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        ends = [end for name in _ENDS if (end := self._tokenizer.token_to_id(name)) is not None]
        if not ends:
            raise BadFileError(
                f"data.args.tokenizer: {path} has no token for the end of a document ({', '.join(_ENDS)}); "
                "add one of them"
            )
        self.end_of_document: int = ends[0]
        self._unknown = _unknown_token(self._tokenizer)
        self._num_tokens = self._num_unknown = 0
        self._alphabet = _alphabet_of(self._tokenizer)
        self._is_lost: dict[str, bool] = {}
        self._lost: Counter[str] = Counter()

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text, uint32, without those that the tokenizer adds at its ends."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        encoded = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        for text, tokens in zip(texts, encoded, strict=True):
            self._num_tokens += len(tokens)
            if self._unknown is not None:
                self._num_unknown += int((tokens == self._unknown).sum())
            if self._alphabet is not None:
                self._count_lost(text, self._alphabet)
        return encoded

    def losses(self) -> Iterator[str]:
        """Yield lines on text that was encoded as the unknown token, or has no token at all."""
        if self._unknown is not None and self._num_unknown:
            name = self._tokenizer.id_to_token(self._unknown)
            yield f"{self._num_unknown} of {self._num_tokens} tokens are {name}, the unknown token"
        if self._lost:
            names = sorted(self._lost, key=lambda char: (-self._lost[char], char))
            yield (
                f"{counted(self._lost.total(), 'character')} of the text have no token and are lost: "
                f"{listed(list(map(ascii, names)), 5)}"
            )

    def _count_lost(self, text: str, alphabet: set[str]) -> None:
        characters = set(text)
        for character in characters - self._is_lost.keys():
            self._is_lost[character] = not set(_pieces(self._tokenizer, character)) <= alphabet
        self._lost.update({char: text.count(char) for char in characters if self._is_lost[char]})

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text without special tokens."""
        return str(self._tokenizer.decode(list(tokens)))


def _unknown_token(tokenizer: Any) -> int | None:
    """Return the token of unknown text; None if there is none."""
    name = getattr(tokenizer.model, "unk_token", None)
    if name is not None:
        return cast("int | None", tokenizer.token_to_id(name))
    return cast("int | None", json.loads(tokenizer.to_str())["model"].get("unk_id"))


def _alphabet_of(tokenizer: Any) -> set[str] | None:
    """Return the characters of the vocabulary if the tokenizer drops all others; None if it does not.

    BPE without an unknown token and without bytes drops what is not in its vocabulary.
    """
    from tokenizers import models, pre_tokenizers

    model = tokenizer.model
    if not isinstance(model, models.BPE) or model.unk_token is not None or model.byte_fallback:
        return None
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values() if not token.special]
    alphabet = set().union(*tokenizer.get_vocab(with_added_tokens=False), *added)
    return None if alphabet.issuperset(pre_tokenizers.ByteLevel.alphabet()) else alphabet


def _pieces(tokenizer: Any, text: str) -> str:
    """Return the text from which the model makes tokens."""
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    if tokenizer.pre_tokenizer is not None:
        text = "".join(piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))
    return text


def _missing(name: str, package: str) -> BadFileError:
    return BadFileError(
        f"data.args.tokenizer: {name} needs {package}, which is not installed; run "
        "`pip install 'hpc-train[lm]'`, or write bytes or characters"
    )


class Decoder(Protocol):
    """Decodes tokens without the network."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``, which may begin or end within a character."""


class Vocabulary:
    """The bytes of each token, as ``prepare`` stores them: decodes without tiktoken and without network."""

    def __init__(self, path: Path) -> None:
        self._bytes = [base64.b64decode(token) for token in json.loads(path.read_text(encoding="utf-8"))]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self._bytes[token] for token in tokens).decode(errors="replace")


def decoder_of(info: DataInfo) -> Decoder | None:
    """Return a decoder for tokens of the data; None if this machine has none."""
    if info.class_names:
        return Characters("".join(info.class_names))
    if info.tokenizer in (None, "bytes"):
        return Bytes()
    if "/" not in info.tokenizer:
        return None
    path = Path(info.tokenizer)
    try:
        return Vocabulary(path) if path.name == VOCABULARY else TokenizerFile(path)
    except (BadFileError, OSError, ValueError):
        return None
