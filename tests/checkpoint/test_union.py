"""Checkpoints of ranks that hold different layers, and several ranges of rows of one tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hpc_train.paths import RunPaths
from hpc_train.training.checkpoint.checkpointer import Checkpointer
from hpc_train.training.checkpoint.control_group import ControlGroup
from hpc_train.training.checkpoint.export import export
from hpc_train.training.checkpoint.state import DIFFERENT, TrainingState
from hpc_train.training.strategies.base import Piece
from hpc_train.training.strategies.pieces import dealt_out, dealt_pieces
from hpc_train.training.train_state import Ema
from tests.checkpoint.checkpoint_runs import (
    begin_and_finish,
    differences,
    error_of,
    folder_names,
    forge,
    make_run,
    saving_group,
)
from tests.parallelism.groups import Group

RANKS = 3
WIDTH = 6
LAYERS = ("first", "second", "head")
#: Layer → the ranks that hold it; those share the rows of its fused ``qkv``.
Placing = Mapping[str, Sequence[int]]
#: Two ranks alike, and one that holds the rest.
TWO_STAGES: Placing = {"first": (0, 1), "second": (2,), "head": (2,)}
#: All three differ; rank 0 holds what rank 1 does, and more.
THREE_STAGES: Placing = {"first": (2,), "second": (0, 1), "head": (0,)}
EVERYWHERE: Placing = dict.fromkeys(LAYERS, (0, 1, 2))
ALONE: Placing = dict.fromkeys(LAYERS, (0,))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 3 * WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)


class Head(nn.Module):
    """Has tied weights, and nothing that does not decay."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.other.weight = self.one.weight


def by_decay(layers: Mapping[str, list[nn.Parameter]]) -> list[dict[str, Any]]:
    """Group as ``decay_norm_and_bias: false`` does; a rank may lack a group."""
    parameters = [each for layer in layers.values() for each in layer]
    groups: list[dict[str, Any]] = [
        {"params": [each for each in parameters if each.dim() >= 2]},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def together(layers: Mapping[str, list[nn.Parameter]]) -> list[dict[str, Any]]:
    return [{"params": [each for layer in layers.values() for each in layer]}]


def by_layer(layers: Mapping[str, list[nn.Parameter]]) -> list[dict[str, Any]]:
    """Group by layer, all at a learning rate of 0, as a schedule's end has it: groups of equal values."""
    return [{"params": layer, "lr": 0.0} for layer in reversed(list(layers.values()))]


GROUPINGS = {"by_decay": by_decay, "together": together, "by_layer": by_layer}


@cache
def mesh_of(ranks: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh("cpu", list(ranks))


class Stages:
    """The strategy, and what it trains: each rank owns the layers that ``placing`` gives it.

    As little as a checkpoint needs of ``strategies.base.Strategy``.
    """

    def __init__(
        self, placing: Placing, rank: int = 0, world_size: int = 1, seed: int = 0, grouping: str = "by_decay"
    ) -> None:
        self.placing, self.rank, self.world_size = placing, rank, world_size
        torch.manual_seed(seed)
        layers = {"first": Block(), "second": Block(), "head": Head()}
        for layer in layers.values():
            layer.double()
        self.dealt: dict[int, int] = {}
        for name in LAYERS:  # all ranks make the same meshes
            if len(placing[name]) > 1:
                self._deal(layers[name], tuple(placing[name]))
        self.model = nn.Module()
        held: dict[str, list[nn.Parameter]] = {}
        for name in LAYERS:
            if rank in placing[name]:
                self.model.add_module(name, layers[name])
                held[name] = list(layers[name].parameters())
        self.optimizer = torch.optim.AdamW(GROUPINGS[grouping](held), lr=0.01, foreach=False)
        self.ema = Ema(self.model, 0.5)

    def _deal(self, layer: nn.Module, ranks: tuple[int, ...]) -> None:
        mesh = mesh_of(ranks)
        if not isinstance(layer, Block) or self.rank not in ranks:
            return
        for name in ("weight", "bias"):
            local = dealt_out(getattr(layer.qkv, name).detach(), 3, len(ranks)).chunk(len(ranks))
            own = local[ranks.index(self.rank)].clone()
            parameter = nn.Parameter(DTensor.from_local(own, mesh, (Shard(0),)))
            setattr(layer.qkv, name, parameter)
            self.dealt[id(parameter)] = len(ranks)

    def pieces(self, tensor: Tensor, like: Tensor) -> list[Piece]:
        if id(like) in self.dealt and tensor.shape == like.shape:
            assert isinstance(tensor, DTensor)
            mesh = tensor.device_mesh
            return dealt_pieces(tensor, 3, mesh.size(), mesh.get_local_rank())
        shape = tuple(tensor.shape)
        # Nobody is the writer: what all who have it have whole is dealt out.
        return [Piece(shape, (0,) * len(shape), tensor.detach(), is_writer=False)]

    def empty_like(self, shape: Sequence[int], dtype: torch.dtype, like: Tensor | None) -> Tensor:
        if like is not None:
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
        return torch.empty(tuple(shape), dtype=dtype)

    def train(self, steps: int = 2) -> None:
        """Step with gradients that are a function of the global weights: the same on any placing."""
        for _ in range(steps):
            for parameter in self.model.parameters():
                parameter.grad = parameter.detach() * 2 + 1
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.ema.update()

    @property
    def state(self) -> TrainingState:
        return TrainingState(self.model, self.optimizer, averages=self.ema.averages)

    def checkpointer(self, run: RunPaths) -> Checkpointer:
        group = saving_group() if self.world_size > 1 else None
        return Checkpointer(run, 1, self, self.rank, self.world_size, group)  # type: ignore[arg-type]

    def held(self) -> list[tuple[str, Piece]]:
        """Return this rank's pieces of all that must come back."""
        found = []
        for name, value in self.model.state_dict(keep_vars=True).items():
            likes = [(f"model.{name}", value, value)]
            if name in self.ema.averages:
                likes.append((f"ema.{name}", self.ema.averages[name], value))
            for key, tensor in self.optimizer.state.get(value, {}).items():
                likes.append((f"optimizer.{name}.{key}", tensor, value))
            found += [(full, piece) for full, tensor, like in likes for piece in self.pieces(tensor, like)]
        return [(name, Piece(p.shape, p.offset, p.local.detach().clone(), p.is_writer)) for name, p in found]


def assembled(of_ranks: Sequence[list[tuple[str, Piece]]]) -> dict[str, Tensor]:
    """Return whole tensors of what ranks own; where two own the same, it must be equal."""
    found: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for name, piece in (each for of_rank in of_ranks for each in of_rank):
        whole = found.setdefault(name, torch.zeros(piece.shape, dtype=piece.local.dtype))
        is_seen = seen.setdefault(name, torch.zeros(piece.shape, dtype=torch.bool))
        place = tuple(slice(at, at + n) for at, n in zip(piece.offset, piece.local.shape, strict=True))
        assert torch.equal(whole[place][is_seen[place]], piece.local[is_seen[place]]), name
        whole[place], is_seen[place] = piece.local, True
    assert all(bool(each.all()) for each in seen.values()), "a part is on no rank"
    return found


# What ranks do ----------------------------------------------------------------------------------------


def save(rank: int, ranks: int, folder: Path, placing: Placing, grouping: str = "by_decay") -> Any:
    """Save twice: the second time the ranks tell each other of no tensor, and numbers have changed."""
    stages = Stages(placing, rank, ranks, seed=1, grouping=grouping)
    stages.train()
    checkpointer = stages.checkpointer(RunPaths(folder))
    checkpointer.save(stages.state, 1, {"by": rank})
    for group in stages.optimizer.param_groups:
        group["lr"], group["step"] = 0.5, 7
    stages.train(1)
    checkpointer.begin(stages.state, 2, {"by": rank})
    before = stages.held()
    checkpointer.wait_staged()
    stages.train(1)
    checkpointer.finish()
    return before


def load(rank: int, ranks: int, folder: Path, placing: Placing, grouping: str = "by_decay") -> Any:
    stages = Stages(placing, rank, ranks, seed=2, grouping=grouping)
    loaded = stages.checkpointer(RunPaths(folder)).load_newest(stages.state)
    assert loaded is not None and loaded.extra == {"by": 0}
    assert all(group["step"] == 7 and group["lr"] != 0.5 for group in stages.optimizer.param_groups)
    found = stages.held()
    stages.train(1)  # what was loaded can train
    return found


def refusal(rank: int, ranks: int, folder: Path, placing: Placing, grouping: str = "by_decay") -> str:
    stages = Stages(placing, rank, ranks, seed=2, grouping=grouping)
    before = stages.held()
    error = error_of(lambda: stages.checkpointer(RunPaths(folder)).load_newest(stages.state))
    assert differences(assembled_alone(before), assembled_alone(stages.held())) == []
    return error


def assembled_alone(held: list[tuple[str, Piece]]) -> dict[str, Tensor]:
    return {f"{name} {piece.offset}": piece.local for name, piece in held}


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    made = Group(RANKS)
    yield made
    made.close()


def state_of(run: RunPaths, step: int = 2) -> Any:
    return json.loads(run.checkpoint(step).state.read_text())


def trained_alone(steps: int) -> dict[str, Tensor]:
    alone = Stages(ALONE, seed=1)
    alone.train(2)
    for each in alone.optimizer.param_groups:
        each["lr"] = 0.5
    alone.train(steps)
    return assembled([alone.held()])


# Any placing reads any other ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("grouping", ["by_decay", "together", "by_layer"])
def test_any_placing_of_layers_reads_any_others(group: Group, tmp_path: Path, grouping: str) -> None:
    placings = [TWO_STAGES, THREE_STAGES, EVERYWHERE]
    for number, written in enumerate(placings):
        run = make_run(tmp_path / str(number))
        expected = assembled(group.run(save, run.folder, written, grouping))
        assert {"ema.head.one.weight", "optimizer.first.qkv.bias.exp_avg_sq"} <= expected.keys()
        for read in placings:
            found = assembled(group.run(load, run.folder, read, grouping))
            assert differences(found, expected) == [], (written, read)
        assert differences(assembled([load(0, 1, run.folder, ALONE, grouping)]), expected) == []


@pytest.mark.slow
def test_what_one_rank_wrote_is_read_by_ranks_with_a_part_each(group: Group, run: RunPaths) -> None:
    expected = assembled([save(0, 1, run.folder, ALONE)])
    for placing in (TWO_STAGES, THREE_STAGES):
        assert differences(assembled(group.run(load, run.folder, placing)), expected) == []


@pytest.mark.slow
def test_the_files_have_the_plain_layout(group: Group, run: RunPaths, tmp_path: Path) -> None:
    """Compared with one rank's training, which knows nothing of pieces."""
    group.run(save, run.folder, TWO_STAGES)
    expected = trained_alone(1)
    export(run, tmp_path / "out")
    exported = load_file(tmp_path / "out")
    assert "head.other.weight" in exported
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, expected[f"model.{name}"], rtol=0, atol=1e-12)
    state = load_file(run.checkpoint(2).shard(0))["optimizer.first.qkv.weight.exp_avg..2"]
    rows = expected["optimizer.first.qkv.weight.exp_avg"][2 * WIDTH : 2 * WIDTH + WIDTH // 2]
    torch.testing.assert_close(state, rows, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_each_rank_writes_what_it_holds_and_holders_share_the_whole(group: Group, run: RunPaths) -> None:
    group.run(save, run.folder, TWO_STAGES)
    shards = [set(load_file(run.checkpoint(2).shard(rank))) for rank in range(RANKS)]
    assert all(name.split(".")[1] == "first" for name in shards[0] | shards[1])
    assert all(name.split(".")[1] in ("second", "head") for name in shards[2])
    keys = {f"model.first.qkv.weight{suffix}" for suffix in ("", "..1", "..2")}
    assert keys <= shards[0] & shards[1]
    whole = [{name for name in shard if "norm" in name} for shard in shards[:2]]
    assert whole[0] and whole[1] and not whole[0] & whole[1]
    tensors = state_of(run)["tensors"]
    half = WIDTH // 2
    offsets = [[rank, [part * WIDTH + rank * half]] for rank in (0, 1) for part in range(3)]
    pieces = [[*place, [half], *([number % 3] if number % 3 else [])] for number, place in enumerate(offsets)]
    assert tensors["model.first.qkv.bias"]["pieces"] == pieces
    assert tensors["model.head.one.weight"]["pieces"] == [[2, [0, 0], [4, 4]]]


@pytest.mark.slow
def test_the_state_tells_of_all_ranks_and_plain_layouts_are_as_they_were(
    group: Group, run: RunPaths, tmp_path: Path
) -> None:
    group.run(save, run.folder, TWO_STAGES)
    state = state_of(run)
    assert state["tied"] == {"model.head.other.weight": "model.head.one.weight"}
    assert state["extra"] == {"by": 0}
    groups = state["optimizer"]["groups"]
    assert [(each["rank"], each["values"]["lr"]) for each in groups] == [(0, 0.5)] * 2 + [(2, 0.5)] * 2
    alone = Stages(ALONE)
    names = set(dict(alone.model.named_parameters()))
    assert {name for each in groups for name in each["params"]} == names == set(state["optimizer"]["state"])
    plain = make_run(tmp_path / "plain")
    group.run(save, plain.folder, EVERYWHERE)
    assert [set(each) for each in state_of(plain)["optimizer"]["groups"]] == [
        {"params", "values", "tensors"}
    ] * 2


# What does not fit ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_missing_or_foreign_is_refused_alike_on_all_ranks(group: Group, run: RunPaths) -> None:
    group.run(save, run.folder, TWO_STAGES)
    tensors = state_of(run)["tensors"]
    tensors["model.stranger"] = tensors.pop("model.second.norm.bias")
    tensors["model.first.norm.bias"]["shape"] = [2, 3]
    tensors["model.first.norm.bias"]["pieces"][0][1:3] = [[0, 0], [2, 3]]
    forge(run.checkpoint(2), tensors=tensors)
    errors = group.run(refusal, run.folder, TWO_STAGES)
    assert len(set(errors)) == 1
    assert errors[0].startswith("BadFileError: model: the model in the file is not the one in the checkpoint")
    for part in (
        "model.first.norm.bias is F64 [2, 3] in the checkpoint, F64 [6] in the model",
        "model.stranger is not in the model",
        "model.second.norm.bias is missing in the checkpoint",
    ):
        assert errors[0].count(part) == 1


@pytest.mark.slow
def test_a_layer_that_no_rank_holds_is_refused(group: Group, run: RunPaths) -> None:
    group.run(save, run.folder, TWO_STAGES)
    errors = group.run(refusal, run.folder, TWO_STAGES | {"second": ()})
    assert len(set(errors)) == 1
    assert "model.second.qkv.weight is not in the model" in errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("written", [TWO_STAGES, EVERYWHERE])
def test_other_groups_are_refused_on_all_ranks(group: Group, run: RunPaths, written: Placing) -> None:
    group.run(save, run.folder, written)
    for read in (TWO_STAGES, EVERYWHERE):
        errors = group.run(refusal, run.folder, read, "together")
        assert len(set(errors)) == 1
        assert errors[0].startswith("BadFileError: optimization.optimizer: its parameter groups are not")
    alone = refusal(0, 1, run.folder, ALONE, "together")
    sizes = [3, 6] if written is EVERYWHERE else [1, 3, 2, 3]
    assert f"(parameters by group: [9], in the checkpoint {sizes})" in alone


@pytest.mark.slow
def test_groups_that_were_one_are_not_two_now(group: Group, run: RunPaths) -> None:
    group.run(save, run.folder, TWO_STAGES, "together")
    errors = group.run(refusal, run.folder, THREE_STAGES)
    assert len(set(errors)) == 1 and "parameter groups are not" in errors[0]


def freeze_on_one(rank: int, ranks: int, folder: Path) -> str:
    """The checkpoint has a parameter that no rank optimises now."""
    stages = Stages(TWO_STAGES, rank, ranks)
    if rank == 2:
        stages.optimizer.param_groups[0]["params"].pop()
    return error_of(lambda: stages.checkpointer(RunPaths(folder)).load_newest(stages.state))


def without_averages(rank: int, ranks: int, folder: Path) -> str:
    stages = Stages(TWO_STAGES, rank, ranks)
    state = TrainingState(stages.model, stages.optimizer)
    return error_of(lambda: stages.checkpointer(RunPaths(folder)).load_newest(state))


def without_one_average(rank: int, ranks: int, folder: Path) -> str:
    stages = Stages(TWO_STAGES, rank, ranks)
    if rank == 2:
        del stages.ema.averages["head.one.weight"]
    return error_of(lambda: stages.checkpointer(RunPaths(folder)).load_newest(stages.state))


@pytest.mark.slow
def test_what_no_rank_optimises_or_averages_is_refused_alike(group: Group, run: RunPaths) -> None:
    group.run(save, run.folder, TWO_STAGES)
    for work, said in (
        (freeze_on_one, "its parameter groups are not the checkpoint's"),
        (without_averages, "optimization.ema: the checkpoint has an average of the weights, the file none"),
        (without_one_average, "ema.head.one.weight is not in the model"),
    ):
        errors = group.run(work, run.folder)
        assert len(set(errors)) == 1 and said in errors[0]


# Saves that do not fit together -----------------------------------------------------------------------------


def change_alone(rank: int, ranks: int, folder: Path) -> list[str]:
    """Return what is raised where one rank's tensors change alone, shapes differ, a name is another
    tensor's on one rank alone, and two ranks describe the state of one parameter differently.
    """
    stages = Stages(TWO_STAGES, rank, ranks)
    checkpointer = stages.checkpointer(RunPaths(folder))
    checkpointer.save(stages.state, 1, {})
    if rank == 2:
        stages.train(1)
    seen = [error_of(lambda: begin_and_finish(checkpointer, stages.state, 2))]
    checkpointer.save(stages.state, 3, {})  # they agree again
    extra = nn.Module()
    extra.register_buffer("same_name", torch.zeros(2 if rank else 3))
    other = TrainingState(extra, torch.optim.SGD([{"params": []}]))
    seen.append(error_of(lambda: checkpointer.save(other, 4, {})))
    linear = nn.Linear(2, 2, bias=False)
    tied = nn.ModuleDict({"b": linear} if rank else {"a": linear, "b": linear})
    other = TrainingState(tied, torch.optim.SGD(tied.parameters()))
    seen.append(error_of(lambda: checkpointer.save(other, 5, {})))
    both = Stages(THREE_STAGES, rank, ranks)
    both.train(1)
    if rank == 1:  # which holds what rank 0 does
        for values in both.optimizer.state.values():
            values["count"] = 5
    other_checkpointer = both.checkpointer(RunPaths(folder))
    seen.append(error_of(lambda: other_checkpointer.save(both.state, 6, {})))
    checkpointer.save(stages.state, 7, {})
    return seen


@pytest.mark.slow
def test_ranks_that_contradict_each_other_all_raise_and_save_nothing(group: Group, run: RunPaths) -> None:
    for seen in group.run(change_alone, run.folder):
        assert len(seen) == 4
        assert all(error.startswith("HpcTrainError: ") and DIFFERENT in error for error in seen), seen
    assert folder_names(run) == ["step-00000001", "step-00000003", "step-00000007"]


def odd_dtype(rank: int, ranks: int, folder: Path) -> str:
    model = nn.Module()
    model.register_buffer(f"of_{rank}", torch.zeros(2, dtype=torch.complex64 if rank == 1 else torch.float32))
    stages = Stages(TWO_STAGES, rank, ranks)
    state = TrainingState(model, torch.optim.SGD([{"params": []}]))
    return error_of(lambda: stages.checkpointer(RunPaths(folder)).save(state, 1, {}))


@pytest.mark.slow
def test_a_number_format_that_one_rank_can_not_save_fails_on_all(group: Group, run: RunPaths) -> None:
    for error in group.run(odd_dtype, run.folder):
        assert error.startswith("BadFileError: ") and "model.of_1: a checkpoint can't hold" in error


# What is sent ---------------------------------------------------------------------------------------------


def count_texts(rank: int, ranks: int, folder: Path) -> dict[str, int]:
    """Return how many texts ranks sent each other while they saved twice, by placing."""
    found = {}
    sent: list[int] = []
    send = ControlGroup._text_of

    def counting(self: ControlGroup, source: int, text: str) -> str:
        sent.append(source)
        return send(self, source, text)

    for name, placing in {"everywhere": EVERYWHERE, "two": TWO_STAGES, "three": THREE_STAGES}.items():
        stages = Stages(placing, rank, ranks)
        checkpointer = stages.checkpointer(RunPaths(folder))
        ControlGroup._text_of = counting  # type: ignore[method-assign]
        try:
            for step in (1, 2):
                checkpointer.save(stages.state, step, {})
        finally:
            ControlGroup._text_of = send  # type: ignore[method-assign]
        found[name] = len(sent)
        sent.clear()
    return found


@pytest.mark.slow
def test_tables_are_sent_once_by_the_first_rank_that_holds_the_same(group: Group, run: RunPaths) -> None:
    assert group.run(count_texts, run.folder) == [{"everywhere": 0, "two": 2, "three": 3}] * RANKS


def speak(rank: int, ranks: int) -> list[list[str]]:
    control = ControlGroup(rank, ranks, saving_group())
    said = ["aba"[rank], "same", "", "é" * rank, "x" * 100_000 if rank == 2 else ""]
    return [control.texts(text) for text in said]


@pytest.mark.slow
def test_every_rank_hears_every_ranks_text(group: Group) -> None:
    expected = [["a", "b", "a"], ["same"] * 3, [""] * 3, ["", "é", "éé"], ["", "", "x" * 100_000]]
    assert group.run(speak) == [expected] * RANKS
