"""Deprecated: import from ``hpc_train.datasets.types``. Plug-ins written for 0.1 import this module."""

from __future__ import annotations

import warnings

from hpc_train.datasets.types import Batch, DataInfo, TargetSpec

__all__ = ["Batch", "DataInfo", "TargetSpec"]

warnings.warn("hpc_train.runtime.data_info is now hpc_train.datasets.types", DeprecationWarning, stacklevel=2)
