"""Makes transformers' models run on tensors without data as on tensors with data.

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
    """Declare that no batch packs several sequences into one row, which transformers 5 detects from
    positions.

    Detection fails on the meta device, and under FakeTensorMode it makes each layer store a mask that no run
    has. The number of matrix products is the same with and without a mask.
    """
    module = sys.modules.get(_MODULE)
    if module is None or not hasattr(module, _FUNCTION):
        yield
        return
    with patch.object(module, _FUNCTION, lambda position_ids: None):
        yield
