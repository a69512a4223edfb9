"""Peak memory that `plan` predicts, compared with what two ranks measure: total and by part.

    python -m benchmarks.memory_prediction [--quick]

Two gloo ranks on the CPU train two steps in fp32 under AdamW, two micro-batches per rank (four in a
pipeline): ResNet-50 on 64 × 64 pixels, a ViT-B with four of its blocks, and the package's GPT with four
blocks of width 384. In the second step torch's profiler records each allocation and each release of torch's
CPU allocator with its address; the prediction observes operators instead, so they share no code. From the
record follows the moment of the peak and which gradients were there; parameters, optimizer state and buffers,
which exist before the step, are counted as storages. A gradient is what autograd leaves in ``grad``, from its
allocation on.

Under fsdp and tensor gloo reduces a copy, and it gathers into a buffer. Where gloo's thread is the last to
release it, after its event, the profile lacks the release: the same address is allocated again, or it
outlives the step. It then counts as released when gloo's event ends.

Errors are relative to the measurement; of a part only where it is more than 5 % of the total. Activations
here include what is gathered and communicated and, under fsdp, whole gradients until the last micro-batch.
Writes benchmarks/results/memory_prediction.json.
``--quick``: GPT under ddp alone.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch._C._profiler import _EventType
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring import conditions, parser, report, table
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.topology.batch_arithmetic import BatchArithmetic
from hpc_train.experiment.topology.degrees import Degrees, find_degrees
from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.distributed.device import choose_precision
from hpc_train.training.forward import TrainingForward
from hpc_train.training.memory_prediction import PredictedStep
from hpc_train.training.non_finite import Guard
from hpc_train.training.step import train_step
from hpc_train.training.strategies.base import RankContext
from hpc_train.training.tasks.base import make_task
from hpc_train.training.train_state import TrainState, build

TITLE = "Peak memory of a rank, predicted and measured"
RANKS = 2
STRATEGIES = ("ddp", "fsdp", "zero1", "tensor", "pipeline")
CHECKPOINTING = ("off", "blocks")
PARTS = ("parameters", "gradients", "optimizer", "activations and buffers")
#: Of the total, below which a part's error does not count.
SMALL = 0.05
_CPU = torch.device("cpu")
_NUM_SAMPLES = 10**6
#: How the names of operators begin that allocate what gloo reduces or gathers, and of its threads' events.
_COMMUNICATING = ("c10d::_reduce_scatter_base_", "_c10d_functional::all_reduce", "FSDP::all_gather (")
_OF_GLOO = "gloo:"
#: What no tensor of floating-point numbers has: sizes of these marks in the profile.
_FIRST_MARK, _MARK_STEP = 4001, 4
#: Time in ns, address, and bytes; of a release the bytes are negative.
_Event = tuple[int, int, int]


@dataclass(frozen=True)
class Model:
    """What is trained."""

    name: str
    args: dict[str, Any]
    task: str
    info: DataInfo
    sample: Batch
    micro_batch_size: int
    strategies: tuple[str, ...] = STRATEGIES


def _images(side: int) -> tuple[DataInfo, Batch]:
    half = (0.5,) * 3
    images = torch.zeros(1, 3, side, side, dtype=torch.uint8)
    return DataInfo(1000, 3, half, half), _sample(images, torch.zeros(1, dtype=torch.int64))


def _tokens(length: int, words: int) -> tuple[DataInfo, Batch]:
    tokens = torch.zeros(1, length, dtype=torch.int64)
    return DataInfo(words, 0, (), (), sequence_length=length), _sample(tokens, tokens.clone())


def _sample(inputs: Tensor, targets: Tensor) -> Batch:
    return Batch(0, 0, 1.0, inputs, targets, torch.ones(1, dtype=torch.bool))


_GPT = {"num_layers": 4, "dim": 384, "num_heads": 6, "tie_embeddings": False}
GPT = "GPT, 4 blocks"
MODELS = {
    GPT: Model("gpt", _GPT, "causal_lm", *_tokens(256, 4096), 4),
    "ViT-B, 4 blocks": Model("timm/vit_base_patch16_224", {"depth": 4}, "classification", *_images(224), 4),
    "ResNet-50": Model(
        "torchvision/resnet50", {}, "classification", *_images(64), 16, ("ddp", "fsdp", "zero1", "pipeline")
    ),
}


def experiment_of(model: Model, strategy: str, checkpointing: str) -> Experiment:
    slots = 4 if strategy == "pipeline" else 2 if strategy == "tensor" else 2 * RANKS
    return Experiment.model_validate({
        "name": "memory",
        "task": model.task,
        "model": {"name": model.name, "args": model.args},
        "data": {"name": "synthetic"},
        "parallel": {"strategy": strategy},
        "activation_checkpointing": checkpointing,
        "optimization": {
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "global_batch_size": slots * model.micro_batch_size,
            "micro_batch_size": model.micro_batch_size,
            "steps": 2,
        },
    })  # fmt: skip


def degrees_of(experiment: Experiment) -> Degrees:
    found = find_degrees(experiment.parallel, RANKS, RANKS)
    assert isinstance(found, Degrees)
    return found


def predicted(model: Model, experiment: Experiment, rank: int) -> dict[str, int]:
    """Return the predicted bytes by part."""
    step = PredictedStep(
        experiment, model.info, model.sample, _NUM_SAMPLES, degrees_of(experiment), rank, is_on_gpu=False
    )
    parts = step.predict().parts
    return {
        **{part: parts[part] for part in PARTS[:3]},
        PARTS[3]: parts["activations"] + parts["buffers"],
    }


def measured(model: Model, experiment: Experiment, rank: int) -> dict[str, int]:
    """Return the bytes by part at the peak of this rank's second step. Collective."""
    degrees = degrees_of(experiment)
    context = RankContext(rank, degrees, _CPU, choose_precision("fp32", _CPU), parallel=experiment.parallel)
    arithmetic = BatchArithmetic.of(experiment.optimization, _NUM_SAMPLES, degrees.data_ranks)
    whole = replace(model.sample.repeated(model.micro_batch_size), weight=1 / arithmetic.micro_batches)
    batches = [replace(whole, number=slot * degrees.data_ranks) for slot in range(arithmetic.accumulation)]
    is_pipeline = experiment.parallel.strategy == "pipeline"
    others = _storages() if is_pipeline else {}
    state = build(experiment, model.info, arithmetic, context)
    task = make_task(experiment, model.info)
    forward = TrainingForward.of(experiment, model.info, state, task, context.precision, _CPU)
    guard = Guard(experiment.optimization, state.model, norm_counts=False)
    state.wrapped.train()
    train_step(state, 0, batches, forward, guard, None)
    gc.collect()
    marks = _Marks(state)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        train_step(state, 1, batches, forward, guard, None, marks.all_gradients)
    events = _events(recorded.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    parts = _before(state)
    if is_pipeline:
        parts[PARTS[3]] += _receive_buffers(state, others)
    for part, size in _at_the_peak(events, marks.addresses).items():
        parts[part] += size
    return dict(parts)


class _Marks:
    """Leaves an allocation of an odd size in the profile wherever a gradient is complete."""

    def __init__(self, state: TrainState) -> None:
        #: Size of the mark → address of the gradient.
        self.addresses: dict[int, int] = {}
        self._trained = [*state.model.parameters(), *state.strategy.optimized().values()]
        for value in state.model.parameters():
            if value.requires_grad:
                value.register_post_accumulate_grad_hook(self._mark)

    def _mark(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            size = _FIRST_MARK + _MARK_STEP * len(self.addresses)
            self.addresses[size] = _local(parameter.grad).untyped_storage().data_ptr()
            torch.empty(size, dtype=torch.uint8)

    def all_gradients(self) -> None:
        for value in self._trained:
            self._mark(value)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = [_local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _storages() -> dict[int, int]:
    """Return address and bytes of the memory of all tensors that Python knows."""
    found = {}
    for value in gc.get_objects():
        if isinstance(value, Tensor):
            with suppress(RuntimeError):  # a tensor without memory
                storage = _local(value).untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return found


def _before(state: TrainState) -> Counter[str]:
    """Return what is there before the step."""
    parameters, optimizer = _owned(state)
    trained = [value for value in state.model.parameters() if value.requires_grad]
    has_buckets = isinstance(state.wrapped, DistributedDataParallel)
    return Counter({
        "parameters": _bytes(parameters),
        "gradients": sum(value.nbytes for value in trained) if has_buckets else 0,
        "optimizer": _bytes(optimizer),
        "activations and buffers": _bytes(state.model.buffers()),
    })  # fmt: skip


def _owned(state: TrainState) -> tuple[list[Tensor], list[Tensor]]:
    """Return parameters and what the optimizer keeps of them."""
    kept = [value for values in state.optimization.optimizer.state.values() for value in values.values()]
    parameters = [*state.model.parameters(), *state.strategy.optimized().values()]
    return parameters, [value for value in kept if isinstance(value, Tensor)]


def _receive_buffers(state: TrainState, others: Mapping[int, int]) -> int:
    """Return the bytes of what a stage receives into, which torch 2.11 keeps between steps."""
    parameters, optimizer = _owned(state)
    known = [*parameters, *optimizer, *state.model.buffers()]
    now = _storages()
    owned = {_local(value).untyped_storage().data_ptr() for value in known}
    return sum(now[address] for address in now.keys() - owned - others.keys())


def _events(tree: Iterable[Any]) -> list[_Event]:
    """Return all allocations and releases in order."""
    nodes = list(_nodes(tree))
    recorded = sorted(_allocations(nodes))
    below = _nodes(child for node in nodes if node.name.startswith(_COMMUNICATING) for child in node.children)
    copies = {event for event in _allocations(below) if event[2] > 0}
    times = sorted((node.start_time_ns, node.end_time_ns) for node in nodes if node.name.startswith(_OF_GLOO))
    return sorted([*recorded, *_unrecorded_releases(recorded, copies, times)])


def _nodes(tree: Iterable[Any]) -> Iterator[Any]:
    nodes = list(tree)
    while nodes:
        node = nodes.pop()
        yield node
        nodes.extend(node.children)


def _allocations(nodes: Iterable[Any]) -> Iterator[_Event]:
    for node in nodes:
        if node.tag == _EventType.Allocation:
            yield node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size


def _unrecorded_releases(
    recorded: Sequence[_Event], copies: Iterable[_Event], times: Sequence[tuple[int, int]]
) -> Iterator[_Event]:
    """Yield the releases of gloo's copies that the profile lacks.

    ``times``: when gloo's threads began and ended a collective, in order.
    """
    for begin, address, size in copies:
        later = (change for time, of, change in recorded if of == address and time > begin)
        if next(later, size) > 0:  # allocated again without a release, or never released
            yield next(end for start, end in times if start > begin), address, -size


def _at_the_peak(events: list[_Event], addresses: Mapping[int, int]) -> dict[str, int]:
    """Return the bytes by part at the peak of what the step allocated."""
    live: dict[int, int] = {}
    gradients: set[int] = set()  # numbers of allocations
    sizes: list[tuple[int, int]] = []
    for number, (_, address, change) in enumerate(events):
        if change > 0:
            live[address] = number
            if change in addresses and (marked := live.get(addresses[change])) is not None:
                gradients.add(marked)
            sizes.append((number, change))
        else:
            sizes.append((live.pop(address, -1), change))
    now: Counter[str] = Counter()
    best, most = dict(now), 0
    for number, change in sizes:
        now["gradients" if number in gradients else PARTS[3]] += change
        if (total := sum(now.values())) > most:
            best, most = dict(now), total
    return best


def _rank_main(rank: int, folder: str, cases: list[tuple[Model, Experiment]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.save([measured(model, experiment, rank) for model, experiment in cases], f"{folder}/{rank}")
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort in Python's tear-down


def measure(cases: list[tuple[Model, Experiment]]) -> list[list[dict[str, int]]]:
    """Return each rank's measurement of each case; the ranks start once."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank_main, (folder, cases), nprocs=RANKS, start_method="spawn")  # type: ignore[no-untyped-call]
        return [torch.load(Path(folder) / str(rank)) for rank in range(RANKS)]


def error(found: Mapping[str, int], expected: Mapping[str, int]) -> dict[str, float]:
    """Return the relative errors: of the total, and of each part that is not small."""
    total = sum(expected.values())
    errors = {"total": sum(found.values()) / total - 1}
    for part in PARTS:
        if max(found[part], expected[part]) > SMALL * total:
            errors[part] = found[part] / expected[part] - 1 if expected[part] else 1.0
    return errors


def compared(found: Mapping[str, int], expected: Mapping[str, int]) -> dict[str, float]:
    """Return a row of the table."""
    errors = error(found, expected)
    worst = max((value for part, value in errors.items() if part != "total"), key=abs)
    return {
        "predicted, MB": sum(found.values()) / 1e6,
        "measured, MB": sum(expected.values()) / 1e6,
        "error, %": 100 * errors["total"],
        "largest error of a part, %": 100 * worst,
    }


def run(name: str, strategies: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return a model's rows, of the rank that was measured to need the most."""
    cases, titles = [], []
    model = MODELS[name]
    for strategy in (each for each in strategies if each in model.strategies):
        for checkpointing in CHECKPOINTING:
            cases.append((model, experiment_of(model, strategy, checkpointing)))
            titles.append(strategy + (", checkpointing" if checkpointing != "off" else ""))
    by_rank = measure(cases)
    rows = {}
    for title, (_, experiment), *each in zip(titles, cases, *by_rank, strict=True):
        rank = max(range(RANKS), key=lambda number: sum(each[number].values()))
        rows[title] = compared(predicted(model, experiment, rank), each[rank])
    return rows


def main() -> None:
    arguments = parser(__doc__).parse_args()
    for name in [GPT] if arguments.quick else MODELS:
        held = conditions(["timm", "torchvision"])
        rows = run(name, ["ddp"] if arguments.quick else STRATEGIES)
        report("memory_prediction", arguments, held, tables=[table(f"{TITLE}: {name}", "", rows)])


if __name__ == "__main__":
    main()
