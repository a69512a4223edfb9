"""Location and headers of the token shards of ``tokens``. No torch: ``plan`` counts samples.

``hpc-train prepare`` writes them (``datasets.token_writing``), ``datasets.sources.tokens`` reads them::

    root/train.txt, train-*.jsonl, train/**      the text, val likewise
    root/tokens/gpt2-<fingerprint>/index.json    the shards of that text, in order
                                   train-00000.tokens: header of 4096 bytes │ tokens │ starts of documents

The folder name contains the fingerprint of its source, so changed text has another folder. Without any text
in the root the tokenizer's only folder is read. nanoGPT's and llm.c's files are read as well: ``train.bin``,
``fineweb_val_000000.bin``.

Legend: T tokens of a sequence.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from hpc_train.errors import BadFileError, listed
from hpc_train.experiment.config.fields import PositiveInt, Section, StoredCount, StoredFields
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.data_size import num_sequences
from hpc_train.experiment.data_facts.file_content import files_digest
from hpc_train.experiment.data_facts.raw_tokens import ITEM_BYTES, RAW_NAME, RawDtype, Shard, raw_shards
from hpc_train.experiment.data_facts.root_layout import unread_texts, why_not_read
from hpc_train.paths import expanded

MAGIC = b"hpc-train tokens"
VERSION = 1
HEADER_BYTES = 4096
#: Magic, version, number of bytes of JSON that follow.
_BEGIN = struct.Struct("<16sII")
INDEX = "index.json"
#: Larger than the index of a billion documents in shards of a million tokens.
_MAX_INDEX_BYTES = 64 << 20
PARTS: tuple[Literal["train", "val"], ...] = ("train", "val")
_EXTENSIONS = (".txt", ".jsonl")
#: Vocabulary sizes of tokenizers of files without a header.
_VOCABULARIES = {"gpt2": 50257, "bytes": 257}
#: The first, middle and last bytes of a source file are part of the fingerprint.
_BLOCK_BYTES = 4096
#: Version of the use of tokenizer.json files: version 2 ignores their truncation and padding, and encodes the
#: names of special tokens as text. Shards of version 1 are written again.
_TOKENIZATION = b"2"
_REMEDY = "remove its folder, then run `hpc-train prepare`"


class TokensArgs(Section):
    """``data.args`` of tokens."""

    tokenizer: Annotated[str, Field(min_length=1)] = "gpt2"
    """``bytes``, ``characters``, an encoding of tiktoken (``gpt2``), or a path of a tokenizer.json."""
    sequence_length: PositiveInt = 1024
    """T: tokens per sequence."""
    text_key: Annotated[str, Field(min_length=1)] = "text"
    """Key of the text in each line of a JSONL file."""
    shard_tokens: PositiveInt = 100_000_000
    """Tokens per shard that ``prepare`` writes. Does not change the samples."""
    shards: str | None = None
    """Folder of the shards. Default: ``tokens`` in ``data.root``."""
    vocabulary_size: PositiveInt | None = None
    """Size of the vocabulary of nanoGPT's, llm.c's or Megatron's files. Default: the tokenizer's."""
    dtype: RawDtype | None = None
    """``uint16`` or ``uint32``: the tokens of files without a header. Default: from the vocabulary and the
    content."""


@dataclass(frozen=True)
class TokenShards:
    """The shards of each split, in order, and the format of their tokens."""

    parts: Mapping[str, tuple[Shard, ...]]
    #: ``uint16`` or ``uint32``.
    dtype: str
    vocabulary_size: int
    tokenizer: str
    #: The token after each document, if there is one.
    end_of_document: int | None = None
    #: For tokenizer ``characters``: the vocabulary without the end of a document.
    characters: str | None = None
    #: A hash of all tokens and of their format.
    fingerprint: str = ""
    #: The folder that ``prepare`` wrote; None: files without a header.
    folder: Path | None = None

    def num_tokens(self, part: str) -> int:
        """Return the number of tokens of ``train`` or ``val``, over all its shards."""
        return sum(shard.num_tokens for shard in self.parts[part])


class DamagedShardError(BadFileError):
    """A shard differs from the one that ``prepare`` wrote. Never a reason to skip a sample."""

    @classmethod
    def of(cls, path: Path, why: str) -> DamagedShardError:
        """Return the error for a shard or an index."""
        return cls(f"data.root: {path} is not a complete, undamaged file of tokens: {why}; {_REMEDY}")


def count_token_sequences(data: DataConfig) -> int | None:
    """Return N of ``tokens``; None if there are no shards yet: the data set reports the reason."""
    shards = _shards_if_any(data)
    if shards is None:
        return None
    args = TokensArgs.model_validate(data.args)
    return num_sequences(shards.num_tokens("train"), args.sequence_length) or None


def tokens_fingerprint(data: DataConfig) -> dict[str, str]:
    """Return the identity of the tokens, for ``plan.input_files``; empty if there are no tokens here."""
    shards = _shards_if_any(data)
    if shards is None:
        return {}
    parts = {"tokens": shards.fingerprint}
    if shards.folder is None:  # no header with a hash of the tokens
        with suppress(OSError):  # the ranks may be able to read them
            parts["content"] = files_digest([shard.path for part in shards.parts.values() for shard in part])
    return parts


def _shards_if_any(data: DataConfig) -> TokenShards | None:
    try:
        return find_shards(data, TokensArgs.model_validate(data.args))
    except (ValidationError, BadFileError, OSError):
        return None


def find_shards(data: DataConfig, args: TokensArgs) -> TokenShards:
    """Return the shards of the text in ``data.root``. Raises BadFileError or DamagedShardError."""
    root = root_of(data)
    texts = sources(root)
    if texts["train"]:
        folder = shards_folder(root, args, texts)
        if (folder / INDEX).is_file():
            return read_index(folder)
        raise BadFileError(
            f"data.root: {folder.parent} has no token shards of the text that {root} contains now, with "
            f"tokenizer {args.tokenizer}; run `hpc-train prepare` with this file, which writes them"
        )
    raw = raw_files(root)
    indexes = _shards_root(root, args).glob(f"{_slug(args)}-{'?' * 12}/{INDEX}")
    prepared = sorted(index.parent for index in indexes)
    if len(prepared) == 1:
        return read_index(prepared[0])
    if prepared:
        raise BadFileError(
            f"data.root: {_shards_root(root, args)} has shards of several texts ("
            f"{', '.join(folder.name for folder in prepared)}) and {root} has none of them; keep one folder"
        )
    if raw["train"]:
        return _raw_tokens(raw, args)
    others = unread_texts(root, ())
    raise BadFileError(
        f"data.root: {root} has no text and no tokens: no train.txt, train*.jsonl, train/*.jsonl or "
        f"train.bin, nor shards in {_shards_root(root, args)}"
        f"{f' (but {listed(others, 5)})' if others else ''}; add one of them, or fix the path"
    )


def root_of(data: DataConfig) -> Path:
    """Return the folder of the text. Raises BadFileError if it is not on this machine."""
    assert data.root is not None, "DataFacts say that it is needed"
    root = expanded(data.root)
    if not root.is_dir():
        what = "is a file; write the folder that contains it" if root.is_file() else "does not exist on this"
        raise BadFileError(f"data.root: {root} {what}{'' if root.is_file() else ' machine; fix the path'}")
    return root


def sources(root: Path) -> dict[str, list[Path]]:
    """Return split → its text files, sorted: ``train.txt``, ``train-*.jsonl``, all below ``train/``."""
    return {part: sorted(_sources(root, part), key=os.fspath) for part in PARTS}


def _sources(root: Path, part: str) -> Iterator[Path]:
    """Yield the text files of a split. Raises BadFileError for a file that must not be opened."""
    for path in _text_paths(root, part):
        if (why := why_not_read(path)) is not None:
            raise BadFileError(f"data.root: {path} {why}; put the text itself there, or remove it")
        yield path


def _text_paths(root: Path, part: str) -> Iterator[Path]:
    for entry in root.iterdir():
        if entry.suffix in _EXTENSIONS and re.fullmatch(rf"{part}([-_.].*)?", entry.stem):
            yield entry
    for folder, folders, names in os.walk(root / part):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if name.endswith(_EXTENSIONS) and name[0] != ".")


def shards_folder(root: Path, args: TokensArgs, texts: Mapping[str, Sequence[Path]]) -> Path:
    """Return the folder for the shards of these files. Reads a few blocks of each.

    Several roots may share a folder ``shards``, so there the name also depends on the root.
    """
    location = [] if args.shards is None else [os.path.realpath(root)]
    digest = hashlib.sha256(json.dumps([VERSION, args.text_key, _tokenizer_id(args), *location]).encode())
    for part, paths in texts.items():
        for path in paths:
            digest.update(json.dumps([part, str(path.relative_to(root))]).encode())
            digest.update(_sampled(path))
    return _shards_root(root, args) / f"{_slug(args)}-{digest.hexdigest()[:12]}"


def _shards_root(root: Path, args: TokensArgs) -> Path:
    return root / "tokens" if args.shards is None else expanded(args.shards)


def tokenizer_file(args: TokensArgs) -> Path | None:
    """Return the path of a configured tokenizer.json; None if ``tokenizer`` is a name."""
    if not args.tokenizer.endswith(".json") and "/" not in args.tokenizer:
        return None
    path = expanded(args.tokenizer)
    return path / "tokenizer.json" if path.is_dir() else path


def _slug(args: TokensArgs) -> str:
    file = tokenizer_file(args)
    name = args.tokenizer if file is None else file.parent.name or "tokenizer"
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)


def _tokenizer_id(args: TokensArgs) -> str:
    file = tokenizer_file(args)
    if file is None:
        return args.tokenizer
    if (why := why_not_read(file)) is not None:
        raise BadFileError(f"data.args.tokenizer: {file} {why}; write the path of a tokenizer.json")
    try:
        return hashlib.sha256(_TOKENIZATION + file.read_bytes()).hexdigest()
    except OSError as error:
        raise BadFileError(
            f"data.args.tokenizer: {file} can't be read: {error.strerror}; fix the path, write one with "
            "AutoTokenizer.from_pretrained(…).save_pretrained(folder), or write bytes, characters or gpt2"
        ) from error


def _sampled(path: Path) -> bytes:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        for offset in (0, size // 2, max(0, size - _BLOCK_BYTES)):
            file.seek(offset)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.digest()


class _Entry(StoredFields):
    file: Annotated[str, Field(pattern=r"^[^./][^/]*$")]
    tokens: StoredCount
    documents: StoredCount
    xxh3_128: str


class _Index(StoredFields):
    dtype: RawDtype
    vocabulary_size: StoredCount
    tokenizer: str
    end_of_document: StoredCount
    characters: str | None
    fingerprint: str
    parts: dict[str, list[_Entry]]


def read_index(folder: Path) -> TokenShards:
    """Return the shards that ``prepare`` wrote. Raises DamagedShardError."""
    path = folder / INDEX
    try:
        with path.open("rb") as file:
            entries = json.loads(file.read(_MAX_INDEX_BYTES))
        index = _Index.model_validate(entries)
    except (ValueError, RecursionError) as error:
        raise DamagedShardError.of(path, "it has other fields than an index") from error
    parts = {part: tuple(_shard(folder, index, entry) for entry in index.parts[part]) for part in index.parts}
    if index.fingerprint != index_digest(entries):
        raise DamagedShardError.of(path, "its hash is not that of its fields")
    if "train" not in parts or not parts.keys() <= set(PARTS):
        raise DamagedShardError.of(path, "it has other splits than train and val")
    size = index.vocabulary_size
    if size > 1 << 8 * ITEM_BYTES[index.dtype] or len(index.characters or "") not in (0, size - 1):
        raise DamagedShardError.of(path, f"its vocabulary of {size} does not fit its dtype or characters")
    return TokenShards(parts, folder=folder, **index.model_dump(exclude={"parts"}))


def index_digest(entries: Mapping[str, Any]) -> str:
    """Return the ``fingerprint``: the hash of an index's fields, which include the shards' hashes."""
    content = {key: entries[key] for key in entries if key not in ("version", "fingerprint", "sources")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _shard(folder: Path, index: _Index, entry: _Entry) -> Shard:
    """Return a shard after a check of its header and size."""
    path = folder / entry.file
    if (why := why_not_read(path)) is not None:
        raise DamagedShardError.of(path, f"it {why}")
    common = index.model_dump(include={"dtype", "vocabulary_size", "tokenizer"})
    if read_header(path) != common | entry.model_dump(exclude={"file"}):
        raise DamagedShardError.of(path, "its header is not what the index says")
    expected = size_of_shard(entry.tokens, entry.documents, index.dtype)
    if (nbytes := path.stat().st_size) != expected:
        raise DamagedShardError.of(path, f"it has {nbytes} bytes, and its header says {expected}")
    return Shard(path, entry.tokens, HEADER_BYTES)


def size_of_shard(num_tokens: int, num_documents: int, dtype: str) -> int:
    """Return the size of a file in bytes: the starts of documents are 8 bytes each, aligned to 8."""
    return documents_offset(num_tokens, dtype) + 8 * num_documents


def documents_offset(num_tokens: int, dtype: str) -> int:
    """Return the offset in a file at which the starts of its documents begin."""
    return HEADER_BYTES + -(-num_tokens * ITEM_BYTES[dtype] // 8) * 8


def header_of(fields: Mapping[str, Any]) -> bytes:
    """Return the first bytes of a shard."""
    text = json.dumps(fields).encode()
    content = _BEGIN.pack(MAGIC, VERSION, len(text)) + text
    assert len(content) <= HEADER_BYTES, "a tokenizer's name is short"
    return content.ljust(HEADER_BYTES, b"\0")


def read_header(path: Path) -> dict[str, Any]:
    """Return the fields of a shard's header. Raises DamagedShardError."""
    try:
        with path.open("rb") as file:
            content = file.read(HEADER_BYTES)
    except FileNotFoundError as error:
        raise DamagedShardError.of(path, "it is missing") from error
    if len(content) < HEADER_BYTES:
        raise DamagedShardError.of(path, f"it ends after {len(content)} bytes")
    magic, version, nbytes = _BEGIN.unpack(content[: _BEGIN.size])
    if magic == MAGIC and version > VERSION:
        raise BadFileError(f"data.root: {path} was written by a newer hpc-train; install that version")
    try:
        fields = json.loads(content[_BEGIN.size : _BEGIN.size + nbytes])
    except (ValueError, RecursionError) as error:
        raise DamagedShardError.of(path, "its header is not JSON") from error
    if magic != MAGIC or not isinstance(fields, dict):
        raise DamagedShardError.of(path, "it does not begin like a shard")
    return fields


def raw_files(root: Path) -> dict[str, list[Path]]:
    """Return split → files of tokens without our header."""
    files: dict[str, list[Path]] = {part: [] for part in PARTS}
    for path in sorted(root.iterdir()):
        if match := RAW_NAME.fullmatch(path.name):
            if (why := why_not_read(path)) is not None:
                raise BadFileError(f"data.root: {path} {why}; put the tokens themselves there, or remove it")
            files[match[1]].append(path)
    return files


def _raw_tokens(files: Mapping[str, list[Path]], args: TokensArgs) -> TokenShards:
    size = args.vocabulary_size or _VOCABULARIES.get(args.tokenizer)
    if size is None:
        raise BadFileError(
            f"data.args.vocabulary_size: is missing, and {files['train'][0]} does not say it; write that of "
            f"tokenizer {args.tokenizer}"
        )
    parts, dtype = raw_shards(files, args.dtype, size)
    digest = hashlib.sha256(b"".join(_sampled(shard.path) for part in parts.values() for shard in part))
    fingerprint = digest.hexdigest()[:32]
    return TokenShards(parts, dtype, size, args.tokenizer, fingerprint=fingerprint)
