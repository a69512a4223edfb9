"""Lets models of transformers run on tensors without data as they run on those with data.

``training.memory_prediction`` and ``training.flops`` run models under ``unpacked_sequences``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

_MODULE, _FUNCTION = "transformers.masking_utils", "find_packed_sequence_indices"


@contextmanager
def unpacked_sequences() -> Iterator[None]:
    """Say that no batch packs several sequences into one row: transformers 5 reads the positions to find out.

    On the meta device that fails, and under FakeTensorMode each layer stores a mask that no run has. The
    number of matrix products is the same with and without a mask.
    """
    module = sys.modules.get(_MODULE)
    if module is None or not hasattr(module, _FUNCTION):
        yield
        return
    with patch.object(module, _FUNCTION, lambda position_ids: None):
        yield
