"""Data-parallel strategies against plain PyTorch: the same gradients, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import ParallelConfig
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.device import choose_precision
from hpc_train.training.distributed.shared_flags import SharedSum, open_shared_sum
from hpc_train.training.strategies.buffers import Buffers, buffers_kept
from hpc_train.training.strategies.fully_sharded import refuse_unshardable
from hpc_train.training.strategies.pieces import made_once, part_of
from hpc_train.training.train_state import Ema
from tests.distributed.scripts import run_script
from tests.forwards import PlainForward, dealt
from tests.rank_context import make_strategy
from tests.ranks import run_ranks

MICRO_BATCHES = 4
MICRO_BATCH_SIZE = 3
NAMES = ("ddp", "fsdp", "hsdp", "zero1", "zero2")


class Counting(nn.Module):
    """A layer whose training forward reads a buffer that it also changes."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(inputs) * (1 + self.calls)


class Averaging(nn.Module):
    """Takes a running mean off; the usual way to write that is to put a new tensor in the buffer's place."""

    mean: Tensor

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, inputs: Tensor) -> Tensor:
        mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        if self.in_place:
            self.mean.copy_(mean)
        else:
            self.mean = mean
        return inputs - self.mean


def make_model(kind: str = "plain") -> nn.Module:
    torch.manual_seed(0)
    middle = [nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(2)]
    extra: list[nn.Module] = {
        "plain": [],
        "batchnorm": [nn.BatchNorm1d(6)],
        "counting": [Counting()],
        "averaging": [Averaging(in_place=False)],
        "averaging in place": [Averaging(in_place=True)],
    }[kind]
    return nn.Sequential(nn.Linear(5, 6), *middle, *extra, nn.Linear(6, 2))


def place(rank: int, world_size: int, name: str, model: nn.Module, precision: str = "fp64") -> Any:
    """Return the strategy; each Sequential of ``model`` is a block."""
    strategy = make_strategy(name, rank, degrees_of(name, world_size), precision)
    strategy.place(model, [child for child in model.children() if isinstance(child, nn.Sequential)])
    return strategy


def make_batch(number: int, weight: float) -> Batch:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(MICRO_BATCH_SIZE, 5, generator=generator, dtype=torch.float64)
    return Batch(
        0, number, weight, inputs, torch.arange(MICRO_BATCH_SIZE) % 2, torch.ones(3, dtype=torch.bool)
    )


def slots(rank: int, world_size: int) -> list[Batch]:
    return dealt(make_batch, MICRO_BATCHES, rank, world_size)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch.inputs), batch.targets)


def full(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def degrees_of(strategy: str, world_size: int) -> Degrees:
    if strategy == "ddp":
        return Degrees(replicate=world_size)
    replicas = 2 if strategy == "hsdp" and world_size % 2 == 0 else 1
    return Degrees(replicate=replicas, shard=world_size // replicas)


def step_of(rank: int, world_size: int, name: str, kind: str) -> dict[str, Any]:
    """Two accumulations and a clipping on one rank; everything gathered."""
    model = make_model(kind)
    strategy = place(rank, world_size, name, model)
    losses = []
    for _ in range(2):
        model.zero_grad()
        strategy.share_buffers(all_persistent=False)
        losses.append(strategy.accumulate(slots(rank, world_size), PlainForward(loss_of)))
    gradients = {key: full(value.grad).clone() for key, value in strategy.optimized().items()}
    norm = strategy.clip_gradients(0.01)
    clipped = {key: full(value.grad).clone() for key, value in strategy.optimized().items()}
    if kind == "counting":
        strategy.share_buffers(all_persistent=True)
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    pieces = {key: strategy.pieces(value, value)[0] for key, value in strategy.optimized().items()}
    held = {key: (piece.shape, piece.offset, tuple(piece.local.shape)) for key, piece in pieces.items()}
    return {"loss": losses[-1], "gradients": gradients, "clipped": clipped, "norm": norm, "buffers": buffers,
            "held": held}  # fmt: skip


def plain_gradients(kind: str) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """Return gradients and loss of a step on one device, and the buffers after two."""
    model = make_model(kind).double()
    mean = torch.stack([loss_of(model, make_batch(number, 0)) for number in range(MICRO_BATCHES)]).mean()
    mean.backward()
    for number in range(MICRO_BATCHES):
        model(make_batch(number, 0).inputs)
    gradients = {key: full(value.grad) for key, value in model.named_parameters()}
    return gradients, mean.detach(), dict(model.named_buffers())


def steps_of(rank: int, world_size: int, kind: str) -> dict[str, dict[str, Any]]:
    return {name: step_of(rank, world_size, name, kind) for name in NAMES}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_and_loss_equal_plain_pytorch_on_any_ranks(world_size: int, tmp_path: Path) -> None:
    found = run_ranks(world_size, steps_of, "batchnorm", folder=tmp_path)
    for name in NAMES:
        assert_equals_plain_pytorch([rank[name] for rank in found])


def assert_equals_plain_pytorch(ranks: list[dict[str, Any]]) -> None:
    expected, mean, buffers = plain_gradients("batchnorm")
    torch.testing.assert_close(sum(rank["loss"] for rank in ranks), mean, rtol=1e-12, atol=0)
    for rank in ranks:
        torch.testing.assert_close(rank["gradients"], expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(rank["buffers"], buffers, rtol=1e-12, atol=1e-12)
        norm = torch.cat([value.flatten() for value in expected.values()]).norm()
        torch.testing.assert_close(rank["norm"].double(), norm, rtol=1e-6, atol=0)
        clipped = torch.cat([value.flatten() for value in rank["clipped"].values()]).norm()
        torch.testing.assert_close(clipped, torch.tensor(0.01, dtype=torch.float64), rtol=1e-3, atol=0)


@pytest.mark.slow
def test_rank_0s_buffers_are_the_runs_and_pieces_cover_each_tensor(tmp_path: Path) -> None:
    found = run_ranks(3, steps_of, "counting", folder=tmp_path)
    for name in NAMES:
        assert_buffers_and_pieces(name, [rank[name] for rank in found])


def assert_buffers_and_pieces(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        # Two steps of two slots each on rank 0; the spare slots of ranks 1 and 2 leave no trace.
        assert rank["buffers"] == {"3.calls": torch.tensor(4.0, dtype=torch.float64)}
    for key, (shape, _, _) in ranks[0]["held"].items():
        rows = [rank["held"][key][2][0] for rank in ranks]
        assert rows == [shape[0]] * 3 if name == "ddp" else sum(rows) == shape[0]


def test_batchnorm_statistics_are_not_read_in_training() -> None:
    assert Buffers(make_model("batchnorm")).tensors(all_persistent=False) == []
    model = make_model("counting")
    (read,) = Buffers(model).tensors(all_persistent=False)
    assert read is dict(model.named_buffers())["3.calls"]


def test_a_forward_that_does_not_count_leaves_buffers_alone() -> None:
    model = make_model("batchnorm").double()
    before = {key: value.clone() for key, value in model.named_buffers()}
    with buffers_kept(model):
        model(make_batch(0, 0.0).inputs)
        assert model[3].num_batches_tracked == 1
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["counting", "averaging", "averaging in place"])
def test_a_spare_slot_leaves_the_buffers_of_its_own_rank_alone(kind: str) -> None:
    model, other = make_model(kind).double(), make_model(kind).double()
    counted, spare = make_batch(0, 1.0), make_batch(1, 0.0)
    place(0, 1, "ddp", model).accumulate([counted, spare], PlainForward(loss_of))
    place(0, 1, "ddp", other).accumulate([counted], PlainForward(loss_of))
    torch.testing.assert_close(dict(model.named_buffers()), dict(other.named_buffers()), rtol=0, atol=0)


def follow(rank: int, world_size: int, name: str, kind: str) -> list[Tensor]:
    """Two steps; return the mean, its average, and the gradients of the last."""
    model = make_model(kind)
    strategy = place(rank, world_size, name, model)
    ema = Ema(strategy.model, 0.5)
    for _ in range(2):
        model.zero_grad()
        strategy.share_buffers(all_persistent=False)
        strategy.accumulate(slots(rank, world_size), PlainForward(loss_of))
        ema.update()
    strategy.share_buffers(all_persistent=True)
    ema.share_buffers(strategy)
    gradients = [full(value.grad).clone() for value in strategy.optimized().values()]
    return [model[3].mean, ema.averages["3.mean"], *gradients]  # type: ignore[index]


def follow_both(rank: int, world_size: int) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    ways = "averaging", "averaging in place"
    return {name: tuple(follow(rank, world_size, name, way) for way in ways) for name in NAMES}  # type: ignore[misc]


@pytest.mark.slow
def test_a_buffer_that_a_forward_replaces_is_as_one_that_it_changes_in_place(tmp_path: Path) -> None:
    ranks = run_ranks(3, follow_both, folder=tmp_path)
    for name in NAMES:
        first, _ = ranks[0][name]
        assert first[0].any() and not torch.equal(first[0], first[1])
        for rank in ranks:
            replaced, in_place = rank[name]
            torch.testing.assert_close(replaced, in_place, rtol=0, atol=0)
            torch.testing.assert_close(replaced[:2], first[:2], rtol=0, atol=0)


def test_a_forward_that_does_not_count_leaves_a_buffer_alone_that_it_replaces() -> None:
    model = make_model("averaging").double()
    before = model[3].mean  # type: ignore[index]
    with buffers_kept(model):
        model(make_batch(0, 0.0).inputs)
        assert model[3].mean.any()  # type: ignore[index]
    assert model[3].mean is before and not before.any()  # type: ignore[index]


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (torch.zeros(2), torch.zeros(3), r"\(3,\) float32 in .* place of the buffer state, which was \(2,\)"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(2), r"write self\.state\.copy_"),
        (None, torch.zeros(2), "the buffer state, which was None; .* persistent=False"),
        (torch.zeros(2), None, "puts None in the place of the buffer state"),
    ],
)
def test_a_buffer_that_would_not_come_back_is_refused(first: Any, then: Any, said: str) -> None:
    model = nn.Module()
    model.register_buffer("state", first)
    buffers = Buffers(model)
    buffers.write_back()
    model.state = then
    with pytest.raises(BadFileError, match=said):
        buffers.write_back()


def test_a_buffer_of_two_names_is_refused_where_one_is_replaced() -> None:
    model = nn.ModuleList([nn.Module(), nn.Module()])
    shared = torch.zeros(2)
    for part in model:
        part.register_buffer("state", shared)
    buffers = Buffers(model)
    assert buffers.tensors() == [shared]
    model[1].state = torch.ones(2)
    with pytest.raises(BadFileError, match=r"the buffer 1\.state is registered twice"):
        buffers.write_back()


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.complex64), ("fp64", torch.complex128)])
def test_complex_constants_keep_their_imaginary_part(precision: str, dtype: torch.dtype) -> None:
    model = make_model()
    angles = torch.polar(torch.ones(2), torch.tensor([0.5, 1.0]))
    model.register_buffer("angles", angles, persistent=False)
    place(0, 1, "ddp", model, precision)
    assert model.angles.dtype == dtype
    assert torch.equal(model.angles, angles.to(dtype))  # type: ignore[arg-type]


def test_complex_tensors_that_are_saved_are_refused() -> None:
    model = make_model()
    model.register_parameter("angles", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(BadFileError, match=r"angles is complex, .*view_as_real"):
        place(0, 1, "ddp", model)


@pytest.mark.parametrize("name", ["ddp", "zero1", "fsdp"])
def test_weights_that_each_rank_would_change_in_its_forward_are_refused(name: str) -> None:
    """An embedding with ``max_norm`` rescales the rows that a rank's own samples look up."""
    model = make_model().append(nn.Embedding(4, 2, max_norm=1.0))
    with pytest.raises(BadFileError, match=r"^model\.name: 4 has max_norm, by which a forward changes the w"):
        place(0, 2, name, model)


@pytest.mark.parametrize("where", ["two blocks", "a block and the rest"])
@pytest.mark.parametrize("name", ["fsdp", "zero2"])
def test_a_parameter_of_two_groups_is_refused(name: str, where: str) -> None:
    model: Any = make_model("counting")
    other = model[2][0] if where == "two blocks" else model[3].linear
    other.weight = model[1][0].weight
    second = "2.0.weight" if where == "two blocks" else "3.linear.weight"
    with pytest.raises(BadFileError, match=f"1.0.weight and {second} are one parameter, .*ddp or zero1"):
        place(0, 1, name, model)


def test_a_parameter_of_two_places_in_one_group_is_none_of_two() -> None:
    model: Any = make_model("counting")
    model[3].linear.weight = nn.Parameter(torch.zeros(6, 6))
    model.append(nn.Linear(6, 6)).append(model[1])
    model[5].weight = model[3].linear.weight
    refuse_unshardable(model, [model[1], model[2]], choose_precision("fp64", torch.device("cpu")), "fsdp")


def test_batchnorm_under_fsdp_in_bf16_is_refused() -> None:
    with pytest.raises(Exception, match=r"write fp32, or parallel\.strategy: ddp"):
        make_strategy("fsdp", precision="bf16").place(make_model("batchnorm"), [])


def train_with_an_unused_parameter(rank: int, world_size: int, args: dict[str, Any]) -> str | list[Tensor]:
    strategy = make_strategy("ddp", rank, Degrees(replicate=world_size), parallel=ParallelConfig(args=args))
    model = make_model()
    model.register_parameter("unused", nn.Parameter(torch.zeros(3)))
    strategy.place(model, [])
    try:
        for _ in range(3):
            model.zero_grad()
            strategy.accumulate(slots(rank, world_size), PlainForward(loss_of))
    except BadFileError as error:
        return str(error)
    return [value.grad for name, value in model.named_parameters() if name != "unused"]


@pytest.mark.slow
def test_an_unused_parameter_is_named_and_can_be_allowed(tmp_path: Path) -> None:
    for said in run_ranks(2, train_with_an_unused_parameter, {}, folder=tmp_path):
        assert "the loss does not use unused; write parallel.args: {find_unused_parameters: true}" in said
    allowed = {"find_unused_parameters": True}
    expected = list(plain_gradients("plain")[0].values())
    for found in run_ranks(2, train_with_an_unused_parameter, allowed, folder=tmp_path):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


class Words(nn.Module):
    """An embedding whose gradients are sparse, and more weights than are averaged at once."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 500, sparse=True)
        self.layers = nn.Sequential(nn.Linear(500, 600), nn.ReLU(), nn.Linear(600, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(self.words(inputs.abs().mul(10).long()).mean(1))


def words_gradients(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients that gloo averages, and those of shared memory."""

    def found(open_sum: Callable[[], SharedSum | None]) -> list[Tensor]:
        torch.manual_seed(0)
        model = Words()
        degrees = Degrees(replicate=world_size)
        strategy = make_strategy("ddp", rank, degrees, "fp32", open_shared_sum=open_sum)
        strategy.place(model, [])
        strategy.accumulate(slots(rank, world_size), PlainForward(loss_of))
        return [value.grad.to_dense().clone() for value in model.parameters() if value.grad is not None]

    averaged: list[int] = []

    def opened() -> SharedSum | None:
        means = open_shared_sum(rank, world_size, dist.group.WORLD, 60.0)  # type: ignore[arg-type]
        assert means is not None
        average = means.average
        means.average = lambda tensor: (averaged.append(tensor.numel()), average(tensor))[1]  # type: ignore[method-assign]
        return means

    found_both = found(lambda: None), found(opened)
    dense = 501 * 600 + 601 * 2
    assert sum(averaged) == 2 * dense  # of the rehearsal, and of the step
    return found_both


@pytest.mark.slow
def test_gradients_of_two_ranks_are_bitwise_the_same_through_shared_memory(tmp_path: Path) -> None:
    (by_gloo, shared), (_, of_other) = run_ranks(2, words_gradients, folder=tmp_path)
    assert len(shared) == 5 and all(gradient.any() for gradient in shared)
    for gradient, expected, other in zip(shared, by_gloo, of_other, strict=True):
        assert torch.equal(gradient, expected) and torch.equal(gradient, other)


@pytest.mark.slow
@pytest.mark.fault(16)
def test_a_rank_that_is_killed_ends_the_backward_of_the_others(tmp_path: Path) -> None:
    script = """
import gc, os, signal, sys
from pathlib import Path
import torch
from hpc_train.rank.env import RankFacts
from hpc_train.training.distributed.process_group import join
from hpc_train.errors import PeerLostError
from hpc_train.experiment.topology.degrees import Degrees
from tests.forwards import PlainForward
from tests.rank_context import make_strategy
from tests.strategies.test_data_parallel import loss_of, make_model, slots
def mapped():
    return Path("/proc/self/maps").read_text().count("/hpc-train-")
facts, device = RankFacts.from_environment(os.environ), torch.device("cpu")
group = join(facts, device, Path(sys.argv[1]), "token")
def train():
    degrees = Degrees(replicate=3)
    strategy = make_strategy("ddp", facts.rank, degrees, open_shared_sum=group.open_shared_sum)
    strategy.place(make_model(), [])
    strategy.accumulate(slots(facts.rank, 3), PlainForward(loss_of))
    assert mapped() == 2, "the flags of the step, and the gradients"
    return strategy
files = len(os.listdir("/proc/self/fd"))
train()
gc.collect()
assert mapped() == 1 and len(os.listdir("/proc/self/fd")) == files, "built again, as after a rollback"
strategy = train()
if facts.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    strategy.accumulate(slots(facts.rank, 3), PlainForward(loss_of))
except PeerLostError as error:
    os._exit(0 if str(error) == "rank 1 has ended" else 1)
"""
    ranks = run_script(script, 3, str(tmp_path / "rendezvous.json"))
    assert [rank.returncode for rank in ranks] == [0, -9, 0], ranks[0].stderr


@pytest.mark.parametrize("name", NAMES)
def test_unknown_arguments_of_a_strategy_are_refused(name: str) -> None:
    with pytest.raises(BadFileError, match=rf"^parallel\.args\.bucket: does not apply to strategy {name}; "):
        make_strategy(name, parallel=ParallelConfig(args={"bucket": 3}))


def groups_after_builds(rank: int, world_size: int) -> list[int]:
    counts = []
    for _ in range(3):
        for name in ("hsdp", "tensor", "pipeline"):
            place(rank, world_size, name, make_model())
        counts.append(len(distributed_c10d._world.pg_map))
    return counts


@pytest.mark.slow
def test_a_model_built_again_takes_no_more_process_groups(tmp_path: Path) -> None:
    """After a rollback, or for another size of micro-batch: NCCL's hold memory until they are destroyed."""
    for counts in run_ranks(2, groups_after_builds, folder=tmp_path):
        assert len(set(counts)) == 1, counts


def test_another_process_group_has_meshes_of_its_own() -> None:
    made = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            made.append([made_once("key", object) for _ in range(2)])
        finally:
            dist.destroy_process_group()
    assert made[0][0] is made[0][1] and made[1][0] is made[1][1]
    assert made[0][0] is not made[1][0]


def test_a_part_of_a_mesh_is_one_object() -> None:
    """torch's compiler finds meshes by identity (tests/parallelism, tensor after tensor of other degrees)."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "tensor"))
        assert part_of(mesh, "tensor") is part_of(mesh, "tensor")
        assert part_of(mesh, "tensor") == mesh["tensor"]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_the_loss_is_the_mean_though_each_forward_overwrites_the_memory_of_the_last(precision: str) -> None:
    strategy = make_strategy("ddp", precision=precision)
    model = strategy.place(nn.Linear(1, 1), [])
    memory = torch.zeros((), dtype=model.weight.dtype)  # as that of a CUDA graph

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        loss = model(batch.inputs).sum()
        loss.data = memory.fill_(batch.number)
        return loss

    inputs = torch.ones(1, 1, dtype=memory.dtype)
    valid = torch.ones(1, dtype=torch.bool)
    batches = [Batch(0, number, 0.25, inputs, None, valid) for number in range(4)]
    mean = strategy.accumulate(batches, PlainForward(loss))
    memory.fill_(9)
    assert (mean.item(), mean.dtype) == (1.5, torch.float64)
