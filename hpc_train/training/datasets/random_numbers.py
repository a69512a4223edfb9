# ruff: noqa: N802, N803, N806  (shape suffixes)
"""Random numbers that depend on counters, not on earlier draws.

Those of the data (``Keys``) are a hash of (seed, epoch, sample, repeat, draw). Those of a forward pass come
from generators that are seeded by (seed, step, micro-batch). Measured on one core, µs per call: torch 1.1,
Python 3.8, NumPy 1.5, the hash 1.1; ``torch.manual_seed`` is 110.

SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014; constants of
https://prng.di.unimi.it/splitmix64.c): output n of the stream with state s is ``mix(s + (n + 1) * golden)``.
Each word of the key takes one step down such a tree. All arithmetic is wrapping int64, so a number is the
same if computed one by one, in a batch, on the CPU or on a GPU.

Legend: B samples, K numbers per sample.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_MASK_64 = 2**64 - 1
#: The tree's root; any constant would do.
_ROOT = 0x6870635F747261


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _shift_right(values: Tensor, bits: int) -> Tensor:
    # Torch shifts int64 arithmetically; the mask removes the copies of the sign bit.
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _mix_tensor(values: Tensor) -> Tensor:
    first, second, third = _SHIFTS
    values = (values ^ _shift_right(values, first)) * _signed(_FACTORS[0])
    values = (values ^ _shift_right(values, second)) * _signed(_FACTORS[1])
    return values ^ _shift_right(values, third)


def splitmix64(value: int) -> int:
    """Return splitmix64's 64-bit output for the state ``value``."""
    first, second, third = _SHIFTS
    value = (value + _GOLDEN) & _MASK_64
    value = ((value ^ (value >> first)) * _FACTORS[0]) & _MASK_64
    value = ((value ^ (value >> second)) * _FACTORS[1]) & _MASK_64
    return value ^ (value >> third)


def hash_words(*values: int) -> int:
    """Return a hash in 0…2⁶⁴-1 of a sequence of integers, each taken modulo 2⁶⁴."""
    state = _ROOT
    for word in values:
        state = splitmix64(state + word * _GOLDEN)
    return state


@cache
def _draw_word(draw: int | str) -> int:
    if isinstance(draw, int):
        return draw
    return int.from_bytes(hashlib.blake2b(draw.encode(), digest_size=8).digest(), "little")


class Keys:
    """The random numbers of B samples in one epoch.

    A ``draw`` names the purpose of a number: the same draw gives the same numbers, different draws
    give independent numbers. ``repeat`` distinguishes repeated uses of a sample within an epoch: one number
    for all samples, or one per sample, (B,) int64.
    """

    def __init__(self, seed: int, epoch: int, samples_B: Tensor, repeat: int | Tensor = 0) -> None:
        self._words = seed, epoch
        self._repeat = repeat
        self._samples_B = samples_B

    @cached_property
    def _keys_B(self) -> Tensor:
        # Computed at the first draw, because many experiments augment nothing.
        states_B: int | Tensor
        if isinstance(self._repeat, Tensor):
            state = _signed((hash_words(*self._words) + _GOLDEN) & _MASK_64)
            states_B = _mix_tensor(state + self._repeat * _signed(_GOLDEN)) + _signed(_GOLDEN)
        else:
            states_B = _signed((hash_words(*self._words, self._repeat) + _GOLDEN) & _MASK_64)
        return _mix_tensor(self._samples_B.to(torch.int64) * _signed(_GOLDEN) + states_B)

    def words(self, draw: int | str) -> Tensor:
        """Return 64 random bits per sample, (B,) int64."""
        step = _signed(((_draw_word(draw) + 1) * _GOLDEN) & _MASK_64)
        return _mix_tensor(self._keys_B + step)

    def words_many(self, draw: int | str, count: int) -> Tensor:
        """Return ``count`` * 64 random bits per sample, (B, K) int64."""
        numbers_K = torch.arange(1, count + 1, device=self._keys_B.device)
        return _mix_tensor(self.words(draw)[:, None] + numbers_K * _signed(_GOLDEN))

    def uniform(self, draw: int | str) -> Tensor:
        """Return numbers in [0, 1), (B,) float64: integer multiples of 2⁻⁵³."""
        return _unit_interval(self.words(draw))

    def uniform_many(self, draw: int | str, count: int) -> Tensor:
        """Return ``count`` numbers per sample in [0, 1), (B, K) float64."""
        return _unit_interval(self.words_many(draw, count))

    def integers(self, draw: int | str, low: int | Tensor, high: int | Tensor) -> Tensor:
        """Return integers in [low, high), (B,) int64; bounds may differ by sample, high - low < 2³¹."""
        return low + ((_shift_right(self.words(draw), 32) * (high - low)) >> 32)

    def flags(self, draw: int | str, probability: float) -> Tensor:
        """Return (B,) bool, true with ``probability``."""
        return self.uniform(draw) < probability


def _unit_interval(values: Tensor) -> Tensor:
    return _shift_right(values, 11).to(torch.float64) * 2.0**-53


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators (on the CPU) for the code of a data set or transform.

    ``seed``: 64 bits, signed or not.
    """
    seed &= _MASK_64
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed >> 1)


@contextmanager
def restored_generators() -> Iterator[None]:
    """Restore the generators, if in the rank itself; in a loader process nothing else uses them."""
    if get_worker_info() is not None:
        yield
        return
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def stream_seed(seed: int, step: int, number: int) -> int:
    """Return the 64-bit seed of a micro-batch's forward pass."""
    return splitmix64(_step_seed(seed, step) ^ number)


@lru_cache(maxsize=2)  # training and an evaluation
def _step_seed(seed: int, step: int) -> int:
    return splitmix64(_seed_word(seed) ^ step)


_seed_word = lru_cache(maxsize=2)(splitmix64)


def seed_forward(seed: int, step: int, number: int, device: torch.device, stage: int = 0) -> None:
    """Seed torch (CPU and ``device``), Python and NumPy for one micro-batch's forward pass.

    ``stage``: of a pipeline; each except the first has its own stream, since it can't know how many numbers
    the previous stages have drawn.
    """
    value = stream_seed(seed, step, number)
    _seed_all(splitmix64(value ^ stage) if stage else value, device)


def seed_build(seed: int) -> None:
    """Seed the generators for a model's initial weights; models are built on the CPU."""
    _seed_all(splitmix64(seed), torch.device("cpu"))


def _seed_all(value: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFF_FFFF)
