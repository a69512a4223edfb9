"""Tensors between ranks and the test: as bytes, since torch saves and loads an archive for each."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


def dumps(value: object) -> bytes:
    """Pickle ``value``; of a tensor its dtype, shape and numbers are kept."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.requires_grad or value.device.type != "cpu":
            return NotImplemented
        numbers = value.contiguous().flatten().view(torch.uint8)
        return _tensor, (numbers.numpy().tobytes(), value.dtype, value.shape)


def _tensor(numbers: bytes, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if not numbers:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(numbers), dtype=dtype).reshape(shape)
