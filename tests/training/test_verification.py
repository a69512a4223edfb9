"""``recovery.verify_every_steps``: whose numbers are wrong, and on which ranks a step is repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpc_train.errors import BadFileError
from hpc_train.training.verification import distances, refuse_inexact, sum_digest, wrong_ranks
from tests.experiments import tiny_experiment

RIGHT, WRONG, OTHER = 1, 2, 3


@pytest.mark.parametrize(
    ("votes", "wrong"),
    [
        ([(0, RIGHT), (1, RIGHT)], set()),
        ([], set()),
        ([(0, WRONG), (0, RIGHT), (1, RIGHT), (1, RIGHT)], {0}),
        ([(0, RIGHT), (0, RIGHT), (1, RIGHT), (1, WRONG)], {1}),
        # Rank 0 repeats its number, and so does rank 1: only a third rank decides.
        ([(0, WRONG), (0, WRONG), (1, RIGHT), (1, RIGHT)], {0, 1}),
        ([(0, WRONG), (0, WRONG), (1, RIGHT), (1, RIGHT), (2, RIGHT)], {0}),
        ([(0, RIGHT), (0, RIGHT), (1, WRONG), (1, WRONG), (2, RIGHT)], {1}),
        ([(0, RIGHT), (0, RIGHT), (1, WRONG), (1, OTHER), (2, WRONG)], {0, 1, 2}),
        # A rank alone.
        ([(0, WRONG), (0, RIGHT), (0, RIGHT), (0, RIGHT)], {0}),
        # Weights.
        ([(0, RIGHT), (1, RIGHT), (2, WRONG), (3, RIGHT)], {2}),
        ([(0, RIGHT), (1, WRONG)], {0, 1}),
    ],
)
def test_the_majority_is_right(votes: list[tuple[int, int]], wrong: set[int]) -> None:
    assert wrong_ranks(votes) == wrong


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("a", [0]),
        ("aa", [1]),
        ("aaa", [1, 2]),
        ("ab", [1]),
        ("abc", [1, 2]),
        ("abcd", [1, 2]),
        ("aabb", [2, 1]),
        ("aabbcc", [2, 4]),
        ("aaabbb", [3, 1]),
        ("aaaabbbb" * 8, [4, 1]),
    ],
)
def test_ranks_of_other_nodes_repeat_a_step(nodes: str, expected: list[int]) -> None:
    assert distances(nodes) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_a_digest_on_a_gpu_changes_with_every_bit_and_place(dtype: torch.dtype, monkeypatch: Any) -> None:
    monkeypatch.setattr("hpc_train.training.verification._CHUNK", 8)
    tensor = (torch.arange(21).reshape(3, 7) - 9).to(dtype)
    digests = {int(sum_digest(tensor)), int(sum_digest(tensor.T.contiguous()))}
    width = tensor.element_size()
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    for place in range(tensor.numel()):
        for bit in (0, 3, 8 * width - 1):
            changed = tensor.clone()
            changed.view(-1).view(bits)[place] ^= torch.tensor(1, dtype=bits) << bit
            digests.add(int(sum_digest(changed)))
    assert len(digests) == 2 + 3 * tensor.numel()
    assert int(sum_digest(tensor.T.contiguous().T)) == int(sum_digest(tensor)), "strides do not matter"
    assert int(sum_digest(tensor[:0])) == 0


@pytest.mark.parametrize(("device", "deterministic"), [("cuda", None), ("cuda", False), ("cpu", False)])
def test_a_step_that_does_not_repeat_bitwise_is_not_verified(device: str, deterministic: bool | None) -> None:
    file = tiny_experiment(recovery={"verify_every_steps": 5}, deterministic=deterministic)
    with pytest.raises(BadFileError, match="deterministic"):
        refuse_inexact(file, torch.device(device))
    refuse_inexact(file.model_copy(update={"deterministic": True}), torch.device(device))
