"""A micro-batch's random numbers depend on (seed, step, micro-batch) alone."""

from __future__ import annotations

import random

import numpy as np
import torch

from hpc_train.training.datasets.random_numbers import seed_build, seed_forward, splitmix64, stream_seed

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def test_streams_are_the_same_whatever_was_drawn_before() -> None:
    seed_forward(7, 100, 3, CPU)
    first = draw()
    torch.randn(3), random.gauss(0, 1), np.random.randn(3)  # leave half of a pair of normals behind
    seed_forward(7, 100, 3, CPU)
    assert draw() == first
    seed_forward(7, 100, 3, CPU)
    normals = torch.randn(5), random.gauss(0, 1), np.random.randn()
    random.gauss(0, 1)
    seed_forward(7, 100, 3, CPU)
    again = torch.randn(5), random.gauss(0, 1), np.random.randn()
    assert torch.equal(normals[0], again[0])
    assert normals[1:] == again[1:]


def test_each_of_seed_step_and_micro_batch_matters_to_each_stream() -> None:
    drawn = []
    for place in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**63 - 1, 2**40, 2**20)]:
        seed_forward(*place, CPU)
        drawn.append(draw())
    assert all(len(set(stream)) == len(drawn) for stream in zip(*drawn, strict=True))


def test_no_two_places_share_a_seed() -> None:
    seeds = {stream_seed(seed, step, n) for seed in range(8) for step in range(200) for n in range(32)}
    assert len(seeds) == 8 * 200 * 32


def test_splitmix64_is_the_published_generator() -> None:
    # The first outputs of the reference implementation from state 0; the state grows by the golden gamma.
    gamma = 0x9E3779B97F4A7C15
    assert [splitmix64(n * gamma & (2**64 - 1)) for n in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_weights_depend_on_the_seed_alone() -> None:
    seed_build(3)
    first = torch.nn.Linear(4, 4).weight
    seed_build(3)
    assert torch.equal(torch.nn.Linear(4, 4).weight, first)
    seed_build(4)
    assert not torch.equal(torch.nn.Linear(4, 4).weight, first)
