"""How many sequences a text makes, counted without the data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts import data_size
from hpc_train.experiment.data_facts.by_name import training_samples
from hpc_train.training.datasets.sources.text import build

ODD = "Größe: 8 €, 𝄞 and\r\n"


def config(root: Path, **args: Any) -> DataConfig:
    return DataConfig(name="text", root=str(root), args=args)


@pytest.mark.parametrize("read_bytes", [7, 1 << 22])
@pytest.mark.parametrize("tokens", ["characters", "bytes"])
@pytest.mark.parametrize("val_fraction", [None, 0, 0.5])
@pytest.mark.parametrize("length", [1, 3, 8])
def test_a_plan_counts_what_the_data_set_has(
    read_bytes: int,
    tokens: str,
    val_fraction: float | None,
    length: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of 7 bytes end within characters."""
    monkeypatch.setattr(data_size, "_READ_BYTES", read_bytes)
    file = tmp_path / "odd.txt"
    file.write_bytes((ODD * 5).encode())
    args = {"tokens": tokens, "sequence_length": length}
    data = config(file, **args) if val_fraction is None else config(file, **args, val_fraction=val_fraction)
    assert training_samples(data) == len(build("", data, download=False).train)


def test_of_a_folder_the_training_text_is_counted(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a" * 101)
    (tmp_path / "val.txt").write_text("a" * 1000)
    assert training_samples(config(tmp_path, sequence_length=10)) == 10


def test_a_sequence_needs_the_token_behind_it(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a" * 20)
    data = config(tmp_path, sequence_length=10)
    assert training_samples(data) == 1
    source = build("", data, download=False)
    _, targets = source.train.batch(torch.tensor([0]))  # type: ignore[attr-defined]
    assert targets.shape == (1, 10)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("nowhere.txt", {}),
        ("short.txt", {"sequence_length": 100}),
        ("short.txt", {"sequence_length": 0}),
        ("short.txt", {"tokens": "words"}),
    ],
)
def test_what_is_not_known_is_left_to_the_data_set(name: str, args: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a" * 50)
    assert training_samples(config(tmp_path / name, **args)) is None
    assert training_samples(DataConfig(name="text")) is None


def test_a_text_that_takes_too_long_to_count_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "long.txt"
    file.write_text("a" * 1000)
    monkeypatch.setattr(data_size, "COUNT_LIMIT_S", -1.0)
    assert training_samples(config(file)) is None
    assert training_samples(config(file, tokens="bytes")) == 7, "asked of the file system, which knows"
