"""The loss and gradients of a step are those of one micro-batch, whatever ``micro_batch_size`` and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.distributed.device import choose_precision
from hpc_train.training.non_finite import Guard
from hpc_train.training.step import StepResult, train_step
from hpc_train.training.strategies.base import RankContext
from hpc_train.training.strategies.ddp import DDPStrategy
from hpc_train.training.tasks.base import Task
from hpc_train.training.tasks.causal_lm import CausalLM
from hpc_train.training.tasks.classification import Classification
from hpc_train.training.tasks.regression import Regression
from hpc_train.training.tasks.segmentation import Segmentation
from tests.experiments import tiny_experiment
from tests.forwards import make_train_state, training_forward
from tests.parallelism.batches import micro_batch
from tests.parallelism.cases import SGD, STRATEGIES, VIT, Case, Choice, Shape, problems_of
from tests.parallelism.groups import Groups
from tests.parallelism.training import Trainee

pytestmark = pytest.mark.usefixtures("one_rank_group")

CPU = torch.device("cpu")
SAMPLES, CLASSES, SIDE, IGNORED = 8, 3, 4, 255
WEIGHTS = [0.5, 3.0, 0.0]
#: Labelled pixels, or predicted tokens, of each sample: one in four has none.
LABELLED = (16, 1, 0, 9, 3, 16, 0, 2)


class Net(nn.Module):
    """The same numbers as outputs of each task: (B, C), (B, T, C), or (B, C, H, W) with an auxiliary head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(2, 5), nn.Linear(5, CLASSES)

    def forward(self, values: Tensor) -> Any:
        hidden = self.first(values).tanh()
        logits = self.second(hidden)
        if self.kind == "images":
            return {"out": logits.permute(0, 3, 1, 2), "aux": hidden[..., :CLASSES].permute(0, 3, 1, 2)}
        return logits.flatten(1, 2) if self.kind == "tokens" else logits.mean((1, 2))


class SumOverLabels:
    """A task of a user's that ignores targets by ``ignore_index``, which is NaN if all are ignored."""

    def __init__(self, experiment: Experiment, info: DataInfo) -> None: ...

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        return model(batch.inputs)["out"]

    def weight(self, batch: Batch) -> Tensor:
        assert batch.inputs is None
        return (batch.targets != IGNORED).sum()

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        return functional.cross_entropy(outputs, batch.targets, ignore_index=IGNORED)


#: Name → task, its outputs, and keys of ``optimization``.
TASKS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "segmentation": (Segmentation, "images", {"label_smoothing": 0.1}),
    "segmentation with class weights": (
        Segmentation, "images",
        {"loss": {"name": "cross_entropy", "args": {"class_weights": WEIGHTS}}, "label_smoothing": 0.1},
    ),
    "dice": (Segmentation, "images", {"loss": {"name": "dice", "args": {"cross_entropy": 0.5}}}),
    "ohem": (Segmentation, "images", {"loss": {"name": "ohem", "args": {"min_kept": 0.3}}}),
    "causal_lm": (CausalLM, "tokens", {"label_smoothing": 0.1}),
    "classification": (Classification, "classes", {"label_smoothing": 0.1}),
    "classification with class weights": (
        Classification, "classes",
        {"loss": {"name": "cross_entropy", "args": {"class_weights": WEIGHTS}}, "label_smoothing": 0.1},
    ),
    "focal": (Classification, "classes", {"loss": {"name": "focal", "args": {"class_weights": WEIGHTS}}}),
    "several classes": (
        Classification, "several", {"loss": {"name": "bce", "args": {"pos_weight": WEIGHTS}}},
    ),
    "regression": (Regression, "numbers", {"loss": "huber"}),
    "a task of one's own": (SumOverLabels, "images", {}),
}  # fmt: skip


def samples(kind: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(SAMPLES, SIDE, SIDE, 2, generator=generator, dtype=torch.float64)
    if kind == "several":
        return values, torch.randint(2, (SAMPLES, CLASSES), generator=generator)
    if kind == "numbers":
        return values, torch.randn(SAMPLES, CLASSES, generator=generator, dtype=torch.float64)
    if kind == "classes":
        return values, torch.tensor([0, 1, 2, 0, 0, 2, 1, 0])
    targets = torch.randint(CLASSES, (SAMPLES, SIDE * SIDE), generator=generator)
    for row, count in zip(targets, LABELLED, strict=True):
        row[count:] = IGNORED
    return values, targets if kind == "tokens" else targets.view(SAMPLES, SIDE, SIDE)


def made(name: str) -> tuple[Experiment, Task]:
    make, kind, keys = TASKS[name]
    sizes = {"global_batch_size": SAMPLES, "micro_batch_size": 1}
    config = tiny_experiment(sizes | keys, model={"name": "own:net", "args": {"num_classes": CLASSES}})
    length = SIDE * SIDE if kind == "tokens" else None
    shape = (CLASSES,) if kind in ("several", "numbers") else ()
    info = DataInfo(
        CLASSES, 1, (0.5,), (0.5,), sequence_length=length, ignore_index=IGNORED, target_shape=shape
    )
    return config, make(config, info)


def step(
    name: str, micro_batch_size: int, targets: Tensor | None = None, precision: str = "fp64"
) -> tuple[StepResult, list[Tensor]]:
    """Train a step on one rank; return its numbers and the weights that it leaves."""
    (config, task), kind = made(name), TASKS[name][1]
    values, given = samples(kind)
    targets = given if targets is None else targets
    chosen = choose_precision(precision, CPU)
    torch.manual_seed(0)
    strategy = DDPStrategy(RankContext(0, Degrees(), CPU, chosen))
    model = Net(kind)
    state = make_train_state(strategy, model, [], config.optimization.optimizer, SAMPLES, precision)
    forward = training_forward(task, scale=state.optimization.scale)
    weight, valid = micro_batch_size / SAMPLES, torch.ones(micro_batch_size, dtype=torch.bool)
    values = values.to(chosen.param_dtype)
    parts = zip(values.split(micro_batch_size), targets.split(micro_batch_size), strict=True)
    batches = [Batch(0, number, weight, *part, valid) for number, part in enumerate(parts)]
    guard = Guard(config.optimization, model, norm_counts=False)
    result = train_step(state, 0, batches, forward, guard, 0.05)
    return result, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("name", TASKS)
def test_a_step_is_that_of_one_micro_batch(name: str) -> None:
    """Loss, gradient norm and clipped update, although some micro-batches have no labels."""
    expected, weights = step(name, SAMPLES)
    _, task = made(name)
    values, targets = samples(TASKS[name][1])
    torch.manual_seed(0)
    whole_batch = Batch(0, 0, 1.0, values, targets, torch.ones(SAMPLES, dtype=torch.bool))
    alone = task.loss(task.forward(Net(TASKS[name][1]).double(), whole_batch), whole_batch)
    torch.testing.assert_close(expected.loss, alone.detach(), rtol=1e-12, atol=0)
    for size in (4, 2, 1):
        found, own = step(name, size)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(found.grad_norm, expected.grad_norm, rtol=1e-12, atol=0)
        torch.testing.assert_close(own, weights, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "label"),
    [(name, IGNORED) for name, (_, kind, _) in TASKS.items() if kind in ("images", "tokens")]
    + [("classification with class weights", WEIGHTS.index(0.0))],
)
def test_a_step_without_weight_has_no_loss_and_no_gradient(name: str, label: int) -> None:
    _, targets = samples(TASKS[name][1])
    result, _ = step(name, 2, torch.full_like(targets, label))
    assert result.loss == 0 and result.grad_norm == 0


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_segmentation_is_torchs_cross_entropy_over_the_step(
    weights: list[float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "segmentation" if weights is None else "segmentation with class weights"
    torch.manual_seed(0)
    values, targets = samples("images")
    outputs = Net("images").double()(values)
    out, aux = (
        functional.cross_entropy(
            outputs[key],
            targets,
            weight=None if weights is None else torch.tensor(weights, dtype=torch.float64),
            ignore_index=IGNORED,
        )
        for key in ("out", "aux")
    )
    make, kind, keys = TASKS[name]
    monkeypatch.setitem(TASKS, name, (make, kind, {**keys, "label_smoothing": 0.0}))
    found, _ = step(name, 1)
    torch.testing.assert_close(found.loss, (out + 0.4 * aux).detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("weight", "words"), [(lambda task, batch: batch.valid, r"shape \(2,\)"), (lambda task, batch: 2, "int")]
)
def test_a_weight_that_is_no_sum_is_refused(weight: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SumOverLabels, "weight", weight)
    with pytest.raises(BadFileError, match=rf"weight returned {words}; return the micro-batch's sum"):
        step("a task of one's own", 2)


@pytest.mark.parametrize("attribute", [None, torch.ones(3)])
def test_an_attribute_that_is_not_a_method_leaves_micro_batches_equal(
    attribute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that was written before there was a weight keeps its loss, without any communication."""
    monkeypatch.setattr(SumOverLabels, "weight", attribute)
    monkeypatch.setattr(dist, "all_reduce", None)
    full = torch.zeros(SAMPLES, SIDE, SIDE, dtype=torch.int64)
    (found, _), (expected, _) = step("a task of one's own", 2, full), step("a task of one's own", 8, full)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=0)


CLASS_WEIGHTS = [0.1, 1.0, 5.0, 0.0]
LOSS = f"optimization.loss={{name: cross_entropy, args: {{class_weights: {CLASS_WEIGHTS}}}}}"
#: Two micro-batches for each of two ranks, and three ranks of which two have a spare slot.
SHAPES = (Shape(2, 4), Shape(3, 4), Shape(4, 8))


def trained(rank: int, ranks: int, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Train a step of a case on this rank; return its loss and whole weights."""
    trainee = Trainee(case.experiment, rank, ranks)
    trainee.train_state.wrapped.train()
    loss, _ = trainee.step(0)
    return loss, trainee.weights()


def one_micro_batch(rank: int, ranks: int, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Train a step by plain PyTorch on all samples at once."""
    trainee = Trainee(case.experiment.model_copy(update={"parallel": type(case.experiment.parallel)()}), 0, 1)
    model = trainee.train_state.model
    parts = [micro_batch(0, number) for number in range(case.shape.micro_batches)]
    images, classes = (torch.cat(part) for part in zip(*parts, strict=True))
    logits = model.train()(images.to(trainee.precision.param_dtype))
    loss = functional.cross_entropy(logits, classes, logits.new_tensor(CLASS_WEIGHTS))
    loss.backward()  # type: ignore[no-untyped-call]
    if (max_norm := case.experiment.optimization.clip_grad_norm) is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    config = case.experiment.optimization
    for parameter in model.parameters():
        decayed = parameter.grad + 0.01 * parameter.detach() if parameter.grad is not None else 0.0
        parameter.data -= config.optimizer.lr * decayed  # type: ignore[operator]
    return loss.detach().double(), trainee.weights()


def case_of(strategy: str, shape: Shape, *overrides: str) -> Case:
    return Case(strategy, shape, (Choice("model", (VIT, SGD, LOSS, *overrides)),))


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    with closing(Groups()) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_divides_by_the_weight_of_the_step(strategy: str, groups: Groups) -> None:
    """With gradient accumulation, spare slots and clipping, in products of degrees."""
    for shape in SHAPES:
        case = case_of(strategy, shape, "precision=fp64", "optimization.clip_grad_norm=0.05")
        if problems_of(case):
            continue
        (expected,) = groups.run(1, one_micro_batch, case)
        ranks = groups.run(shape.ranks, trained, case)
        torch.testing.assert_close(sum(loss for loss, _ in ranks), expected[0], rtol=1e-12, atol=0)
        torch.testing.assert_close(ranks[0][1], expected[1], rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_the_scaler_of_fp16_leaves_the_mean(groups: Groups) -> None:
    case = case_of("ddp", Shape(2, 4), "precision=fp16", "optimization.clip_grad_norm=0.05")
    (expected,) = groups.run(1, one_micro_batch, case_of("ddp", Shape(2, 4), "precision=fp32"))
    ranks = groups.run(2, trained, case)
    torch.testing.assert_close(sum(loss for loss, _ in ranks), expected[0], rtol=2e-3, atol=0)
