"""``reproduce`` names what differs between the machine of a bundle's run and this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from hpc_train.cli import reproduce
from hpc_train.paths import RunPaths
from hpc_train.run.bundle_archive import Bundle, BundleFacts
from hpc_train.run.versions import cpu_model


def differences(monkeypatch: pytest.MonkeyPatch, num_ranks: int = 1, **changes: Any) -> dict[str, Any]:
    monkeypatch.setattr(reproduce, "_packages", lambda facts, run: iter(()))
    values: dict[str, Any] = {
        "id": "a", "name": "b", "begin": 0, "checkpoints": [4], "ranks": 1, "device": "cpu",
        "processor": None, "threads": [1], "is_deterministic": True, "versions": {}, "changes": [],
    }  # fmt: skip
    bundle = Bundle(BundleFacts(**values | changes), "", {})
    found = reproduce._environment(RunPaths(Path("run")), bundle, num_ranks, has_gpu=False)
    return {mismatch["kind"]: (mismatch["bundle"], mismatch["here"]) for mismatch in found}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"device": "cuda", "processor": "NVIDIA H200"}, {"device": ("GPU", "CPU")}),
        ({"processor": "Z80 (1 core)"}, {"processor": ("Z80", cpu_model())}),
        ({"processor": f"{cpu_model()} (64 cores)"}, {}),
        ({"ranks": 3, "threads": [1, 1, 2]}, {"ranks": ("3", "1"), "threads": ("1, 1, 2", None)}),
        ({"changes": ["a rollback"]}, {"run": (None, None)}),
        ({"is_deterministic": False}, {"run": (None, None)}),
    ],
)
def test_what_may_change_numbers_is_named(
    changes: dict[str, Any], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce.os, "sched_getaffinity", lambda pid: range(64))
    assert differences(monkeypatch, **cast(Any, changes)) == expected
