"""Names that plug-ins import."""

from __future__ import annotations

import importlib
import sys

import pytest

from hpc_train.datasets import types


def test_the_names_that_plug_ins_of_0_1_import_are_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hpc_train.runtime.data_info", raising=False)
    with pytest.warns(DeprecationWarning, match=r"is now hpc_train\.datasets\.types"):
        old = importlib.import_module("hpc_train.runtime.data_info")
    assert (old.Batch, old.DataInfo, old.TargetSpec) == (types.Batch, types.DataInfo, types.TargetSpec)
