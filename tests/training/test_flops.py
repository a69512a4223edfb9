"""FLOPs of a step, against counts by formula; a multiply-add is two."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from hpc_train.experiment.validate.model_rules import GPTArgs
from hpc_train.run.metric_rows import iter_rows
from hpc_train.training.activation_checkpointing import checkpoint_activations
from hpc_train.training.datasets.types import Batch, map_tensors
from hpc_train.training.distributed.forking import ForkedCall
from hpc_train.training.flops import FlopCount, FlopRates, count_flops, without_weights
from hpc_train.training.models.gpt import GPT
from tests.end_to_end.runs import submit
from tests.ranks import run_ranks
from tests.waiting import HANG_LIMIT_S

B = 4


class Task:
    """Cross entropy over the last dimension."""

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        return model(batch.inputs)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        return cross_entropy(outputs.flatten(0, -2), batch.targets.flatten())

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        raise AssertionError

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        raise AssertionError


def batch_of(inputs: Tensor, targets: Tensor) -> Batch:
    return Batch(0, 0, 1.0, inputs, targets, torch.ones(len(inputs), dtype=torch.bool))


def images(*shape: int) -> Batch:
    return batch_of(torch.zeros(B, *shape), torch.zeros(B, dtype=torch.int64))


def on_meta(batch: Batch) -> Batch:
    inputs, targets = (
        map_tensors(lambda each: each.to("meta"), each) for each in (batch.inputs, batch.targets)
    )
    return replace(batch, inputs=inputs, targets=targets)


def counted(model: nn.Module, batch: Batch) -> int:
    copy = without_weights(model)
    assert copy is not None
    return count_flops(copy, Task(), on_meta(batch))


def mlp(*, is_frozen: bool = False) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3))
    model[0].requires_grad_(not is_frozen)
    return model


def test_a_linear_layer_counts_forward_weights_and_inputs() -> None:
    first, second = 2 * B * 10 * 20, 2 * B * 20 * 3
    # Nobody needs the gradient of the data.
    assert counted(mlp(), images(10)) == 2 * first + 3 * second
    assert counted(mlp(is_frozen=True), images(10)) == first + 2 * second


def test_a_convolution_counts_each_output() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, stride=2), nn.Flatten(),
        nn.Linear(4 * 3 * 3, 5),
    )  # fmt: skip
    first, second, last = 2 * B * 8 * 64 * 3 * 9, 2 * B * 4 * 9 * 8 * 9, 2 * B * 36 * 5
    assert counted(model, images(3, 8, 8)) == 2 * first + 3 * (second + last)


def gpt_flops(num_tokens: int, length: int, layers: int, dim: int) -> int:
    """Per sample: 12·d² weights in the matrices of a layer, attention of each token to each, and the head."""
    per_token = layers * (12 * dim**2 + 2 * length * dim) + dim * num_tokens
    return 3 * 2 * length * per_token


def gpt() -> tuple[GPT, Batch]:
    tokens = torch.zeros(B, 16, dtype=torch.int64)
    return GPT(65, 16, GPTArgs(num_layers=2, num_heads=2, dim=32)), batch_of(tokens, tokens)


def test_the_gpt_counts_its_matrices_and_attention() -> None:
    assert counted(*gpt()) == B * gpt_flops(65, 16, 2, 32)


def test_what_is_computed_again_does_not_count() -> None:
    model, batch = gpt()
    copy = without_weights(model)
    checkpoint_activations(model.blocks(), "blocks")
    assert copy is not None
    assert count_flops(copy, Task(), on_meta(batch)) == B * gpt_flops(65, 16, 2, 32)


def test_the_copy_has_no_weights_and_shares_what_the_model_shares() -> None:
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)])
    model[1].weight = model[0].weight  # type: ignore[assignment]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copy = without_weights(model)
    assert copy is not None and all(value.is_meta for value in copy.state_dict().values())
    assert copy[0].weight is copy[1].weight  # type: ignore[index]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Attending(nn.Module):
    """Attention whose FLOPs are known, around an operator that may not be."""

    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inputs = nn.Linear(8, 8)
        self.operator = operator

    def forward(self, sequences: Tensor) -> Tensor:
        hidden = self.inputs(sequences)
        return self.operator(scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True))


def test_causal_attention_counts_in_full() -> None:
    linear, attention = 2 * B * 6 * 8 * 8, 2 * 2 * B * 6 * 6 * 8
    batch = batch_of(torch.zeros(B, 6, 8), torch.zeros(B, 6, dtype=torch.int64))
    assert counted(Attending(torch.relu), batch) == 2 * linear + 3 * attention


@torch.library.custom_op("hpc_train_tests::kernel", mutates_args=())
def kernel(values: Tensor) -> Tensor:
    return values.clone()


@kernel.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values)


kernel.register_autograd(lambda context, gradient: gradient)


def per_sample(model: nn.Module, batch: Batch) -> float | None:
    copy = without_weights(model)
    assert copy is not None
    count = FlopCount(copy, Task(), on_meta)
    count.start(batch)
    return count.per_sample(within_s=HANG_LIMIT_S)


@pytest.mark.parametrize(
    ("operator", "why"),
    [
        (
            lambda values: 2 * kernel(values),  # the kernel itself can't be copied
            "the FLOPs of the operator hpc_train_tests.kernel.default are unknown",
        ),
        (lambda values: torch.fft.fft(values).real, "the FLOPs of the operator aten._fft_"),
        (lambda values: values * float(values.sum()), "Tensor.item() cannot be called on meta tensors"),
    ],
)
def test_what_can_not_be_counted_is_logged_once_and_not_reported(
    operator: Callable[[Tensor], Tensor], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    batch = batch_of(torch.zeros(B, 6, 8), torch.zeros(B, 6, dtype=torch.int64))
    copy = without_weights(Attending(operator))
    assert copy is not None
    count = FlopCount(copy, Task(), on_meta)
    assert FlopRates(count, 1).row(100.0) == {}, "not begun"
    count.start(batch)
    assert count.per_sample(within_s=HANG_LIMIT_S) is None
    assert FlopRates(count, 1, 10.0).row(100.0) == {}
    (message,) = caplog.messages
    assert message.startswith("rows have no tflops_per_s and no mfu: ") and why in message


def test_a_model_that_can_not_be_copied_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = mlp()
    model.lock = threading.Lock()  # type: ignore[assignment]
    assert without_weights(model) is None
    assert "the model can't be copied: cannot pickle" in caplog.text


#: What a forward pass of ``Keeping`` leaves for the next one.
KEPT: dict[str, Tensor] = {}


class Keeping(nn.Module):
    """Computes something once, where its inputs are, and keeps it outside of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        KEPT.setdefault("scale", torch.ones(3, device=inputs.device))
        return self.linear(inputs) * KEPT["scale"]


def count_and_train(rank: int, world_size: int) -> float | None:
    model, batch = Keeping(), images(10)
    generator = torch.get_rng_state()
    found = per_sample(model, batch)
    assert not KEPT and torch.equal(torch.get_rng_state(), generator)
    assert model(batch.inputs).device.type == "cpu"
    return found


@pytest.mark.slow
def test_counting_leaves_nothing_behind_for_training(tmp_path: Path) -> None:
    """In a process of its own: of pytest's, a forked child may not be able to run a backward pass."""
    assert run_ranks(1, count_and_train, folder=tmp_path) == [2 * 2 * 10 * 3]


def test_a_child_that_dies_has_no_result() -> None:
    call = ForkedCall(lambda: 1 / 0)
    assert call.has_ended(HANG_LIMIT_S) and call.result() is None
    call = ForkedCall(lambda: print("not shown") or 7)  # type: ignore[func-returns-value]
    assert call.result() == 7


def test_rates_are_per_device_and_of_the_peak() -> None:
    count = FlopCount(mlp(), Task(), on_meta)
    count._per_sample = 2e12
    assert FlopRates(count, num_devices=4).row(8.0) == {"tflops_per_s": 4.0}
    assert FlopRates(count, num_devices=4, peak_tflops=16.0).row(8.0) == {"tflops_per_s": 4.0, "mfu": 0.25}


@pytest.mark.slow
@pytest.mark.parametrize("nan_at", [0, 9])
def test_rows_of_a_run_have_the_rate_once_it_is_known(nan_at: int, tmp_path: Path) -> None:
    """Also after a rollback, in the third step, before any row; the attempt is profiled once."""
    model = f'model={{name: "tests.gpu.parts:counted", args: {{nan_at: {nan_at}}}}}'
    steps = ("optimization.steps=8", "optimization.schedule={name: constant}", "logging.every_steps=4")
    profile = f"profile={{after_steps: {1 if nan_at else 9}, steps: 1}}"
    overrides = ("optimization.on_non_finite=rollback", "data.workers=0", profile)
    paths = submit(tmp_path, model, *steps, *overrides, devices=1)
    row = next(row for row in iter_rows(paths.metrics) if (row["split"], row["step"]) == ("train", 8))
    assert row["tflops_per_s"] > 0
    log = paths.attempt(1).log(0).read_text()
    assert (log.count("going back"), log.count("trace: ")) == ((1, 1) if nan_at else (0, 0))
    assert ("no profile: the attempt ended before its step 9" in log) == (nan_at == 0)
