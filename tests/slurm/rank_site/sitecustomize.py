"""Changes ranks, on whose PYTHONPATH it is, by variables.

``WRONG_NETWORK``: while this file exists, rank 1 never connects to its peers. ``VISIBLE_TO_RANKS``: the value
of CUDA_VISIBLE_DEVICES, as Slurm sets it on nodes with MIG devices.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_MODULE = "hpc_train.training.rank"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _change(rank: Any) -> None:
    import torch.distributed as dist

    rank.CONNECT_LIMIT_S = 5.0  # rather than three minutes
    connect = dist.init_process_group

    def never_connect(*arguments: Any, **keys: Any) -> None:
        if os.environ.get("SLURM_PROCID") == "1":
            threading.Event().wait()
        connect(*arguments, **keys)

    dist.init_process_group = never_connect


if os.path.exists(os.environ.get("WRONG_NETWORK", "")):  # noqa: PTH110
    sys.meta_path.insert(0, _Finder())
if "SLURM_PROCID" in os.environ and "VISIBLE_TO_RANKS" in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["VISIBLE_TO_RANKS"]
