"""The part of Hugging Face's ``datasets`` that ``huggingface`` uses, for tests where it is not installed."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

#: Of the library: whether scripts of the hub may run.
config = SimpleNamespace()


@dataclass
class Image:
    decode: bool = True


@dataclass
class ClassLabel:
    names: list[str]


@dataclass
class Value:
    dtype: str


@dataclass
class Sequence:
    feature: Value


class Features(dict[str, Any]):
    pass


class Dataset:
    def __init__(self, columns: Mapping[str, list[Any]], features: Features) -> None:
        self._columns, self.features = columns, features

    @classmethod
    def from_dict(cls, columns: Mapping[str, list[Any]], features: Features) -> Dataset:
        return cls(columns, features)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: int | slice) -> dict[str, Any]:
        return {name: column[index] for name, column in self._columns.items()}

    def select_columns(self, names: list[str]) -> Dataset:
        return Dataset(
            {name: self._columns[name] for name in names},
            Features({name: self.features[name] for name in names}),
        )

    def cast_column(self, name: str, feature: Any) -> Dataset:
        return Dataset(self._columns, Features(self.features | {name: feature}))

    def with_format(self, kind: None) -> Dataset:
        return self

    def unique(self, name: str) -> list[Any]:
        return list(dict.fromkeys(self._columns[name]))

    def save_to_disk(self, folder: str) -> None:
        _save(self, folder)


class DatasetDict(dict[str, Dataset]):
    def save_to_disk(self, folder: str) -> None:
        _save(self, folder)


def _save(saved: Any, folder: str) -> None:
    Path(folder).mkdir()
    Path(folder, "data.arrow").write_bytes(pickle.dumps(saved))


def load_from_disk(folder: str) -> Any:
    return pickle.loads(Path(folder, "data.arrow").read_bytes())


def load_dataset(name: str, config: str | None, revision: str | None) -> Any:
    raise NotImplementedError("each test has its own")
