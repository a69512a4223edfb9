"""Writes token shards, in ``hpc-train prepare``, in the format of ``data_facts.token_shards``.

Each shard is written under a temporary name, synced and renamed, and the index comes last, so a killed
``prepare`` leaves nothing that ranks read, and two concurrent ones write the same files.
"""

from __future__ import annotations

import json
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hpc_train.console import say
from hpc_train.errors import BadFileError, counted, listed, shortened
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts import root_layout, token_shards
from hpc_train.run.files import replacing, write_json, write_text
from hpc_train.run.storage_errors import storage_error
from hpc_train.training.datasets import tokenization
from hpc_train.training.datasets.token_check import check_all, hash_of_file

#: Documents that the tokenizer's threads encode at a time; fewer if they are long.
_BATCH, _BATCH_CHARACTERS = 512, 1 << 23
_REPORT_EVERY_S = 30.0
#: Maximum number of validation documents that are compared with the training documents (assumed: 60 MB).
_MAX_COMPARED = 1_000_000
#: Folders that this process has written or checked, because the runs of a sweep share them.
_checked: set[Path] = set()

_Sources = Mapping[str, Sequence[Path]]
#: Location (file, or file and line), and text.
_Document = tuple[str, str]


def ensure(data: DataConfig, args: token_shards.TokensArgs) -> None:
    """Write the shards of the text in ``data.root`` unless they are intact and up to date.

    Reads existing shards in full, and text that was touched since. Does nothing if the root has no text.
    Raises BadFileError for text that can't be read, StorageError if the disk refuses the shards.
    """
    root = token_shards.root_of(data)
    texts = token_shards.sources(root)
    _report_unread(root, texts if texts["train"] else token_shards.raw_files(root))
    if not texts["train"]:
        return
    folder = token_shards.shards_folder(root, args, texts)
    if folder in _checked:
        return
    if _is_intact(folder, root, texts):
        say(f"data.root: {folder}: intact and up to date")
    else:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder, root, texts, args)
        except OSError as error:
            raise storage_error(error, folder) from error
        if token_shards.shards_folder(root, args, token_shards.sources(root)) != folder:
            (folder / token_shards.INDEX).unlink()
            raise BadFileError(
                f"data.root: the text in {root} changed while it was tokenized; run prepare again"
            )
    _checked.add(folder)


def _report_unread(root: Path, read: _Sources) -> None:
    paths_read = {path for paths in read.values() for path in paths}
    for line in root_layout.missing_parts(str(path.relative_to(root)) for path in paths_read):
        say(f"data.root: {root}: {line}")
    # Megatron's index of a .bin file.
    paths_read |= {path.with_suffix(".idx") for path in paths_read if path.suffix == ".bin"}
    unread = root_layout.unread_texts(root, paths_read)
    if unread:
        say(
            f"data.root: {counted(len(unread), 'file')} in {root} not read ({listed(unread, 5)}): text is in "
            "train*.txt, train*.jsonl and below train/, val likewise, uncompressed and not in linked folders"
        )
    links = [path for paths in read.values() for path in paths if path.is_symlink()]
    linked = [str(path) for path in links if not path.resolve().is_relative_to(root.resolve())]
    if linked:
        say(
            f"data.root: {counted(len(linked), 'file')} in {root} linked from elsewhere ({listed(linked, 5)})"
        )


def _is_intact(folder: Path, root: Path, texts: _Sources) -> bool:
    """Return True if there are shards of the current text; print the reason if they can't be used."""
    if not (folder / token_shards.INDEX).is_file():
        return False
    try:
        shards = token_shards.read_index(folder)
        check_all(shards)
    except token_shards.DamagedShardError as error:
        say(f"{error}; writing it again")
        return False
    indexed = json.loads((folder / token_shards.INDEX).read_text(encoding="utf-8")).get("sources") or {}
    changed = [
        path
        for paths in texts.values()
        for path in paths
        if not _is_same(path, indexed.get(str(path.relative_to(root))))
    ]
    if changed:
        say(f"data.root: {changed[0]} has changed since it was tokenized; writing the shards again")
    return not changed


def _is_same(path: Path, entry: Any) -> bool:
    """Compare a source with its entry in the index: in full if it was touched since (``st_ctime``)."""
    if not isinstance(entry, dict):
        return False
    return entry.get("time_ns") == path.stat().st_ctime_ns or entry.get("xxh3_128") == hash_of_file(path)


def _write(folder: Path, root: Path, texts: _Sources, args: token_shards.TokensArgs) -> None:
    tokenizer = _tokenizer(texts, args)
    if args.vocabulary_size not in (None, tokenizer.vocabulary_size):
        raise BadFileError(
            f"data.args.vocabulary_size: {args.vocabulary_size}, but tokenizer {args.tokenizer} has "
            f"{tokenizer.vocabulary_size} tokens; take it out (model.args.num_classes makes gpt larger)"
        )
    file = token_shards.tokenizer_file(args)
    if file is not None:
        with replacing(folder / tokenization.TOKENIZER, sync=True) as copy:
            copy.write(file.read_bytes())
    if isinstance(tokenizer, tokenization.TikToken):
        write_text(folder / tokenization.VOCABULARY, json.dumps(tokenizer.vocabulary()), sync=True)
    token_format = {
        "dtype": "uint16" if tokenizer.vocabulary_size <= 1 << 16 else "uint32",
        "vocabulary_size": tokenizer.vocabulary_size,
        "tokenizer": args.tokenizer if file is None else tokenization.TOKENIZER,
    }
    # Before they are read: a file that changes meanwhile is detected by its time.
    times = {path: path.stat().st_ctime_ns for paths in texts.values() for path in paths}
    parts: dict[str, list[dict[str, Any]]] = {}
    shared = _Shared(text for path in texts["val"] for _, text in _documents(path, args))
    for part in (part for part in token_shards.PARTS if texts[part]):
        writer = _SplitWriter(folder, part, token_format, args.shard_tokens)
        for path in texts[part]:
            documents = _documents(path, args)
            for tokens in _encoded(tokenizer, shared.watched(documents) if part == "train" else documents):
                writer.add(tokens, tokenizer)
        parts[part] = writer.finish()
        say(f"data.root: {folder}: {part}: {writer.summary()}")
    if isinstance(tokenizer, tokenization.TokenizerFile):
        for loss in tokenizer.losses():
            say(f"data.root: {loss}; if that is not intended, write another data.args.tokenizer")
    shared.report(root)
    content = token_format | {
        "end_of_document": tokenizer.end_of_document,
        "characters": tokenizer.characters if isinstance(tokenizer, tokenization.Characters) else None,
        "parts": parts,
    }
    hashes = {path: hash_of_file(path) for path in times}
    seen = {
        str(path.relative_to(root)): {"time_ns": time_ns, "xxh3_128": hashes[path]}
        for path, time_ns in times.items()
    }
    index = {
        "version": token_shards.VERSION,
        "fingerprint": token_shards.index_digest(content),
        "sources": seen,
    } | content
    write_json(folder / token_shards.INDEX, index, sync=True)


class _Shared:
    """The validation documents that are also training documents."""

    def __init__(self, texts: Iterator[str]) -> None:
        """``texts``: the validation documents, of which at most ``_MAX_COMPARED`` are compared."""
        self._validation = {_hash_of(text) for text in islice(filter(None, texts), _MAX_COMPARED)}
        self._shared: set[int] = set()

    def watched(self, documents: Iterator[_Document]) -> Iterator[_Document]:
        """Yield the training documents, and remember those that are validation documents."""
        for document in documents:
            if self._validation and (digest := _hash_of(document[1])) in self._validation:
                self._shared.add(digest)
            yield document

    def report(self, root: Path) -> None:
        """Print the number of shared documents, if there are any."""
        if self._shared:
            documents = counted(len(self._validation), "different validation document")
            say(
                f"data.root: {root}: {len(self._shared)} of {documents} are also training documents, and "
                "measure nothing new"
            )


def _hash_of(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode(errors="surrogateescape"))


def _tokenizer(texts: _Sources, args: token_shards.TokensArgs) -> tokenization.Tokenizer:
    if args.tokenizer == "bytes":
        return tokenization.Bytes()
    if args.tokenizer == "characters":
        return tokenization.Characters(_characters(texts, args))
    file = token_shards.tokenizer_file(args)
    return tokenization.TikToken(args.tokenizer) if file is None else tokenization.TokenizerFile(file)


def _characters(texts: _Sources, args: token_shards.TokensArgs) -> str:
    """Return training's characters, sorted, then those only in validation, as in ``text``."""
    seen: dict[str, set[str]] = {
        part: set().union(*(text for path in paths for _, text in _documents(path, args)))
        for part, paths in texts.items()
    }
    return "".join([*sorted(seen["train"]), *sorted(seen["val"] - seen["train"])])


def _documents(path: Path, args: token_shards.TokensArgs) -> Iterator[_Document]:
    """Yield the documents of a file: a .txt file is one, a .jsonl file has one in each line.

    Raises BadFileError for text that is not UTF-8 (tokenizer ``bytes`` accepts any .txt file), and for lines
    without text.
    """
    if path.suffix == ".txt":
        yield str(path), _decoded(path.read_bytes(), path, args)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                place = f"{path}:{number}"
                yield place, _text_of_line(line.removeprefix(BOM_UTF8 if number == 1 else b""), place, args)


def _decoded(content: bytes, path: Path, args: token_shards.TokensArgs) -> str:
    content = content.removeprefix(BOM_UTF8)
    if args.tokenizer == "bytes":
        return content.decode(errors="surrogateescape")
    remedy = "convert it to UTF-8, or write data.args: {tokenizer: bytes}"
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise BadFileError(
            f"data.root: {path} is not UTF-8 text (at byte {error.start}); {remedy}"
        ) from error
    if (place := content.find(b"\0")) >= 0:
        raise BadFileError(
            f"data.root: {path} has a NUL character (at byte {place}), like UTF-16 or damaged text; {remedy}"
        )
    return text


def _text_of_line(line: bytes, place: str, args: token_shards.TokensArgs) -> str:
    try:
        entry = json.loads(line.decode(), object_pairs_hook=refusing_repeated(args.text_key))
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"data.root: {place} is not JSON: {error}; fix or remove the line") from error
    text = entry.get(args.text_key) if isinstance(entry, dict) else None
    if not isinstance(text, str):
        has = f"keys {listed([repr(shortened(key)) for key in entry], 10)}" if isinstance(entry, dict) else ""
        if has and args.text_key in entry:
            has = f"a value of type {type(text).__name__}"
        raise BadFileError(
            f"data.root: {place} has no text {args.text_key!r}, but {has or type(entry).__name__}; write "
            "data.args.text_key, or fix the line"
        )
    if "\0" in text and args.tokenizer != "bytes":
        raise BadFileError(
            f"data.root: {place} has a NUL character (at character {text.index(chr(0))} of its text), like "
            "damaged text; remove it or the line, or write data.args: {tokenizer: bytes}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadFileError(
            f"data.root: {place} has a lone surrogate, half of a character, at character {error.start} "
            f"(\\u{ord(text[error.start]):04x}); replace it by \\ufffd, or remove the line"
        ) from error
    return text


def refusing_repeated(name: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Return a hook for JSON objects that raises ValueError if one has the key ``name`` twice."""

    def entries(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entry = dict(pairs)
        if len(entry) < len(pairs) and sum(key == name for key, _ in pairs) > 1:
            raise ValueError(f"it has the key {name!r} twice")
        return entry

    return entries


def without_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; a hook for ``json``, which by default keeps the last of equal keys.

    Raises ValueError if a key is there twice.
    """
    entry = dict(pairs)
    if len(entry) < len(pairs):
        names = [key for key, _ in pairs]
        repeated = next(key for key in entry if names.count(key) > 1)
        raise ValueError(f"an object has the key {shortened(repeated)!r} twice")
    return entry


def _encoded(
    tokenizer: tokenization.Tokenizer, documents: Iterator[_Document]
) -> Iterator[tokenization.Tokens]:
    """Yield the tokens of each document, encoded in batches."""
    batch: list[_Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document[1])
        if len(batch) == _BATCH or size > _BATCH_CHARACTERS:
            yield from _encode(tokenizer, batch)
            batch, size = [], 0
    yield from _encode(tokenizer, batch)


def _encode(tokenizer: tokenization.Tokenizer, batch: list[_Document]) -> list[tokenization.Tokens]:
    """Return the tokens of each document.

    Raises BadFileError, naming the document, if it can't be encoded or contains the end-of-document token.
    """
    try:
        encoded = tokenizer.encode([text for _, text in batch])
    except Exception as error:  # the libraries raise the base class Exception
        place = batch[0][0]
        if len(batch) > 1:  # find the document
            return [tokens for document in batch for tokens in _encode(tokenizer, [document])]
        raise BadFileError(
            f"data.root: {place} can't be encoded: {type(error).__name__}: {error}; fix the text, or write "
            "another data.args.tokenizer"
        ) from error
    for (place, _), tokens in zip(batch, encoded, strict=True):
        if (tokens == tokenizer.end_of_document).any():
            raise BadFileError(
                f"data.root: {place} has the token of the end of a document "
                f"({tokenizer.end_of_document}) within its text; remove its name from the text, or write "
                "another data.args.tokenizer"
            )
    return encoded


class _SplitWriter:
    """Writes documents as a stream of tokens, cut into shards of equal length."""

    def __init__(self, folder: Path, part: str, token_format: Mapping[str, Any], shard_tokens: int) -> None:
        self._folder, self._part, self._token_format = folder, part, token_format
        self._dtype = np.dtype(token_format["dtype"]).newbyteorder("<")
        self._shard_tokens = shard_tokens
        self._buffer: list[tokenization.Tokens] = []
        self._filled = 0
        #: Starts of the documents in this shard.
        self._starts: list[int] = []
        self._entries: list[dict[str, Any]] = []
        self._num_tokens, self._num_documents, self._num_empty = 0, 0, 0
        self._reported_at = time.monotonic()

    def add(self, tokens: tokenization.Tokens, tokenizer: tokenization.Tokenizer) -> None:
        """Append a document and its end."""
        self._starts.append(self._filled)
        self._num_documents += 1
        self._num_empty += not len(tokens)
        self._append(tokens.astype(self._dtype))
        self._append(np.array([tokenizer.end_of_document], self._dtype))
        if time.monotonic() > self._reported_at + _REPORT_EVERY_S:
            self._reported_at = time.monotonic()
            say(f"data.root: {self._part}: {self._num_tokens} tokens so far")

    def summary(self) -> str:
        """Return the number of tokens and documents."""
        documents = counted(self._num_documents, "document")
        empty = f", {self._num_empty} of them without a token" if self._num_empty else ""
        return f"{counted(self._num_tokens, 'token')} of {documents} written{empty}"

    def finish(self) -> list[dict[str, Any]]:
        """Write the rest; return the index's entries of all shards."""
        if self._filled or not self._entries:
            self._write()
        return self._entries

    def _append(self, tokens: tokenization.Tokens) -> None:
        self._num_tokens += len(tokens)
        while len(tokens):
            part = tokens[: self._shard_tokens - self._filled]
            self._buffer.append(part)
            self._filled += len(part)
            tokens = tokens[len(part) :]
            if self._filled == self._shard_tokens:
                self._write()

    def _write(self) -> None:
        tokens = np.concatenate([np.zeros(0, self._dtype), *self._buffer]).tobytes()
        end = (
            token_shards.documents_offset(self._filled, str(self._token_format["dtype"]))
            - token_shards.HEADER_BYTES
        )
        content = tokens.ljust(end, b"\0") + np.array(self._starts, "<u8").tobytes()
        counted = {
            "tokens": self._filled,
            "documents": len(self._starts),
            "xxh3_128": xxhash.xxh3_128_hexdigest(content),
        }
        name = f"{self._part}-{len(self._entries):05d}.tokens"
        with replacing(self._folder / name, sync=True) as file:
            file.write(token_shards.header_of({**self._token_format, **counted}))
            file.write(content)
        self._entries.append({"file": name, **counted})
        self._buffer, self._filled, self._starts = [], 0, []
