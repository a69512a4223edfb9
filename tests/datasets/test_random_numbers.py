from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.training.datasets.random_numbers import Keys, hash_words, splitmix64

WORDS = st.integers(min_value=0, max_value=2**63 - 1)
GOLDEN_GAMMA = 0x9E3779B97F4A7C15


@given(seed=WORDS, epoch=st.integers(0, 10**6), sample=st.integers(0, 2**40), draw=st.integers(0, 100))
def test_tensor_arithmetic_equals_the_hash_in_python(seed: int, epoch: int, sample: int, draw: int) -> None:
    word = Keys(seed, epoch, torch.tensor([sample])).words(draw).item()
    assert word % 2**64 == hash_words(seed, epoch, 0, sample, draw)


def test_each_sample_may_have_its_own_repeat() -> None:
    samples, repeats = torch.tensor([7, 7, 7, 9]), torch.tensor([0, 1, 2, 1])
    found = Keys(3, 4, samples, repeats).words("x")
    alone = [Keys(3, 4, samples[i : i + 1], int(repeats[i])).words("x") for i in range(4)]
    assert torch.equal(found, torch.cat(alone))
    assert len(set(found.tolist())) == 4


def test_many_words_are_the_stream_of_the_single_one() -> None:
    keys = Keys(3, 4, torch.tensor([5]))
    start = int(keys.words("x").item()) % 2**64
    many = [int(word) % 2**64 for word in keys.words_many("x", 5)[0]]
    assert many == [splitmix64((start + n * GOLDEN_GAMMA) % 2**64) for n in range(5)]


@given(samples=st.lists(st.integers(0, 10**9), min_size=1, max_size=8))
def test_a_sample_has_the_same_numbers_alone_and_in_a_batch(samples: list[int]) -> None:
    batch = Keys(1, 2, torch.tensor(samples)).uniform("flip")
    alone = torch.cat([Keys(1, 2, torch.tensor([sample])).uniform("flip") for sample in samples])
    assert torch.equal(batch, alone)


def test_every_word_of_the_key_matters() -> None:
    samples = torch.arange(100)
    base = Keys(0, 0, samples).words("a")
    others = [
        Keys(1, 0, samples).words("a"),
        Keys(0, 1, samples).words("a"),
        Keys(0, 0, samples, repeat=1).words("a"),
        Keys(0, 0, samples + 1000).words("a"),
        Keys(0, 0, samples).words("b"),
        Keys(0, 0, samples).words(0),
    ]
    seen = torch.cat([base, *others])
    assert len(seen.unique()) == len(seen)


def test_uniform_numbers_fill_the_unit_interval_evenly() -> None:
    numbers = Keys(0, 0, torch.arange(100_000)).uniform("x")
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, bins=10, min=0, max=1)
    assert (counts - 10_000).abs().max() < 500  # five standard deviations


def test_neighbouring_samples_and_epochs_are_uncorrelated() -> None:
    here = Keys(0, 0, torch.arange(50_000)).uniform("x") - 0.5
    after = Keys(0, 1, torch.arange(50_000)).uniform("x") - 0.5
    assert abs((here[1:] * here[:-1]).mean() * 12) < 0.025
    assert abs((here * after).mean() * 12) < 0.025


def test_integers_are_within_bounds_that_differ_by_sample() -> None:
    high = torch.arange(1, 1001)
    numbers = Keys(0, 0, torch.arange(1000)).integers("x", 0, high)
    assert (numbers >= 0).all()
    assert (numbers < high).all()
    assert (numbers > 0).any()


def test_integers_take_every_value_equally_often() -> None:
    numbers = Keys(0, 0, torch.arange(90_000)).integers("x", -4, 5)
    assert numbers.unique().tolist() == list(range(-4, 5))
    assert (torch.bincount(numbers + 4) - 10_000).abs().max() < 500
