"""Bytes counted by hand: fp32 is 4 bytes, int64 8."""

from __future__ import annotations

import torch

from hpc_train.training.live_memory import LiveMemory


def test_the_peak_is_when_most_is_live() -> None:
    with LiveMemory() as memory:
        kept = torch.zeros(100)
        memory.start()
        first = torch.zeros(1000)
        del first
        second = torch.zeros(500)
        found = memory.peak()
        del second, kept
    assert (found["activations"], sum(found.values())) == (4400, 4400)


def test_views_share_their_storage() -> None:
    with LiveMemory() as memory:
        whole = torch.zeros(8, 8)
        halves = whole[:4], whole[4:].t()
        assert memory.peak()["activations"] == 256
        del whole, halves


def test_a_label_counts_from_the_allocation_on() -> None:
    with LiveMemory() as memory:
        memory.start()
        gradient = torch.zeros(10)
        other = torch.zeros(5)
        memory.label([gradient[:2]], "gradients")
        del other
        assert memory.peak() == {
            "parameters": 0, "gradients": 40, "optimizer": 0, "activations": 20, "buffers": 0
        }  # fmt: skip


def test_optimizer_state_of_the_first_step_counts_from_the_start() -> None:
    with LiveMemory() as memory:
        memory.start()
        activation = torch.zeros(100)
        del activation
        state = torch.zeros(50)
        memory.label([state], "optimizer")
        found = memory.peak()
    assert (found["activations"], found["optimizer"]) == (400, 200)


def test_a_resized_storage_is_a_buffer() -> None:
    with LiveMemory() as memory:
        gathered = torch.zeros(10)
        gathered.untyped_storage().resize_(0)
        memory.start()
        gathered.untyped_storage().resize_(80)
        assert memory.peak()["buffers"] == 80
        gathered.untyped_storage().resize_(0)
        assert memory.peak()["buffers"] == 80


def test_sizes_are_rounded_up_to_the_allocators_blocks() -> None:
    with LiveMemory(block_bytes=512) as memory:
        kept = [torch.zeros(1), torch.zeros(129)]
        assert memory.peak()["activations"] == 512 + 1024
        del kept
