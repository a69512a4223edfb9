"""Saving and loading on one rank: bitwise, past damage, and against forged folders."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from timm.optim import list_optimizers
from torch import Tensor, nn

from hpc_train.errors import BadFileError, StorageError, TransientStorageError, UserError
from hpc_train.experiment.config.training_sections import OptimizerConfig
from hpc_train.experiment.topology.degrees import AXES
from hpc_train.experiment.validate.optimizer_rules import TORCH_OPTIMIZERS
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.run.checkpoints import remove, verify
from hpc_train.training.checkpoint import checkpointer as module
from hpc_train.training.checkpoint import shards
from hpc_train.training.checkpoint.checkpointer import Checkpointer
from hpc_train.training.checkpoint.matching import deal
from hpc_train.training.checkpoint.saved_tensors import SavedState, SavedTensor, read_into
from hpc_train.training.checkpoint.state import NamedTensors, NewOptimizerState, TrainingState
from hpc_train.training.optimization import make_optimizer
from tests.checkpoint.checkpoint_runs import (
    Trainee,
    assert_loads,
    begin_attempt,
    claimed_room,
    differences,
    folder_names,
    forge,
    make_run,
)
from tests.rank_context import make_strategy
from tests.waiting import HANG_LIMIT_S

LIMIT_S = HANG_LIMIT_S
SCALER = torch.amp.GradScaler("cpu").state_dict()
EXTRA = {"position": {"step": 3, "skipped": [1]}, "seed": 2**63 - 1, "rate": 0.1}


@pytest.fixture
def saved(run: RunPaths) -> Trainee:
    """Steps 1 and 2 saved; the trainee is at step 2."""
    trainee = Trainee()
    for step in (1, 2):
        trainee.train(1)
        trainee.checkpointer(run).save(trainee.state, step, EXTRA)
    return trainee


def assert_refused(run: RunPaths, trainee: Trainee, words: str | None = None) -> None:
    """Load the newest checkpoint: an error for the user, and nothing of the trainee has changed."""
    before = trainee.everything()
    with pytest.raises(BadFileError, match=words):
        trainee.checkpointer(run).load_newest(trainee.state)
    assert differences(before, trainee.everything()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_everything_is_restored_bitwise(run: RunPaths, dtype: torch.dtype) -> None:
    trainee = Trainee(seed=1, dtype=dtype)
    trainee.train(3)
    trainee.state.scaler.scale(torch.ones(()))  # type: ignore[union-attr]  # makes its tensors
    trainee.checkpointer(run).save(trainee.state, 3, EXTRA)
    other = Trainee(seed=2, dtype=dtype)
    assert differences(trainee.everything(), other.everything())
    loaded = other.checkpointer(run).load_newest(other.state)
    assert loaded is not None and (loaded.step, loaded.extra) == (3, EXTRA)
    assert differences(trainee.everything(), other.everything()) == []
    trainee.train(2)
    other.train(2)
    assert differences(trainee.everything(), other.everything()) == []


def test_the_scaler_comes_back(run: RunPaths) -> None:
    trainee, other = Trainee(), Trainee()
    scaler = trainee.state.scaler
    assert scaler is not None and other.state.scaler is not None
    scaler.load_state_dict(scaler.state_dict() | {"scale": 2048.0, "_growth_tracker": 7})
    trainee.checkpointer(run).save(trainee.state, 1, {})
    other.checkpointer(run).load_newest(other.state)
    assert other.state.scaler.state_dict() == scaler.state_dict()


def test_a_run_without_checkpoints_loads_nothing(run: RunPaths) -> None:
    trainee = Trainee()
    assert trainee.checkpointer(run).load_newest(trainee.state) is None


def test_the_shard_is_safetensors_with_plain_names(run: RunPaths, saved: Trainee) -> None:
    tensors = load_file(run.checkpoint(2).shard(0))
    assert torch.equal(tensors["model.first.weight"], saved.model.first.weight)
    assert tensors["model.norm.num_batches_tracked"].dtype == torch.int64
    assert tensors["optimizer.first.weight.exp_avg"].shape == (8, 5)
    assert tensors["optimizer.first.weight.step"].shape == ()
    assert not {"model.constant", "model.tied_b.weight"} & tensors.keys()
    assert not any("module." in name or "_orig_mod" in name for name in tensors)


@pytest.mark.slow
def test_a_compiled_model_has_the_names_of_the_plain_one() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    whole = torch.compile(plain)
    blocks = nn.Sequential(torch.compile(plain[0]), plain[1])
    for model in (whole, blocks):
        assert NamedTensors.of(model).tensors.keys() == plain.state_dict().keys()


def test_state_that_is_not_a_tensor_is_refused() -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 1}

    with pytest.raises(BadFileError, match=r"0\._extra_state"):
        NamedTensors.of(nn.Sequential(Odd(1, 1)))


def test_saving_a_step_again_replaces_it(run: RunPaths, saved: Trainee) -> None:
    saved.train(1)
    saved.checkpointer(run).save(saved.state, 2, {"again": True})
    assert assert_loads(run, 2, saved) == {"again": True}
    assert folder_names(run) == ["step-00000001", "step-00000002"]


@pytest.mark.fault(13)
def test_old_checkpoints_are_pruned(run: RunPaths) -> None:
    trainee = Trainee()
    for step in range(1, 6):
        trainee.checkpointer(run, keep=2).save(trainee.state, step, {})
    assert folder_names(run) == ["step-00000004", "step-00000005"]


@pytest.mark.fault(15)
@pytest.mark.parametrize("is_beside", [True, False])
def test_an_attempt_that_lost_the_run_commits_and_removes_nothing(
    run: RunPaths, saved: Trainee, is_beside: bool
) -> None:
    begin_attempt(run, 2)
    saved.checkpointer(run, attempt=2).save(saved.state, 3, {"by": 2})
    old = saved.checkpointer(run, attempt=1, keep=2)
    for step in (3, 4):
        with pytest.raises(UserError, match="attempt 2 continues this run"):
            save = old.begin if is_beside else old.save
            save(saved.state, step, {"by": 1})
            old.finish()
    assert folder_names(run) == ["step-00000001", "step-00000002", "step-00000003"]
    assert assert_loads(run, 3, attempt=2) == {"by": 2}


def test_the_next_attempt_continues_from_the_previous_one(run: RunPaths, saved: Trainee) -> None:
    begin_attempt(run, 2)
    assert_loads(run, 2, saved, attempt=2)


class Optimised:
    """A tiny model that the optimizer called ``name`` trains, saved and loaded by itself."""

    def __init__(self, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        bias = name != "torch/muon"  # which takes matrices only
        self.model = nn.Sequential(nn.Linear(5, 4, bias), nn.Tanh(), nn.Linear(4, 3, bias))
        self.optimizer = make_optimizer(
            OptimizerConfig(name=name, lr=0.01), dict(self.model.named_parameters()), 64
        )
        self.state = TrainingState(self.model, self.optimizer)
        self.strategy = make_strategy("ddp", precision="fp32")

    def train(self, steps: range) -> None:
        for step in steps:
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            self.model(inputs).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def checkpointer(self, run: RunPaths) -> Checkpointer:
        return Checkpointer(run, 1, self.strategy)

    def group_kinds(self) -> list[dict[str, str]]:
        """Return, by group, what each value is: a counter that comes back as another type is an error."""
        return [
            {key: f"{type(value).__name__} {getattr(value, 'dtype', '')}" for key, value in group.items()}
            for group in self.optimizer.param_groups
        ]


def check_resumed_equals_straight(name: str, folder: Path) -> None:
    run = make_run(folder / "run")
    straight, stopped, resumed = (Optimised(name, seed) for seed in (1, 1, 2))
    straight.train(range(8))
    stopped.train(range(5))
    stopped.checkpointer(run).save(stopped.state, 5, {})
    loaded = resumed.checkpointer(run).load_newest(resumed.state)
    assert loaded is not None and resumed.group_kinds() == stopped.group_kinds()
    resumed.train(range(5, 8))
    assert differences(straight.model.state_dict(), resumed.model.state_dict()) == []


#: One of each kind of state; the slow test has all names.
_OF_TIMM = (
    "adafactor", "adafactorbv", "adan", "adopt", "lamb", "lambc", "lars", "madgrad", "mars", "muon", "nlarc",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [f"torch/{name}" for name in TORCH_OPTIMIZERS] + [f"timm/{name}" for name in _OF_TIMM]
)
def test_an_optimizer_continues_as_if_never_stopped(name: str, tmp_path: Path) -> None:
    if name == "torch/muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    check_resumed_equals_straight(name, tmp_path)


@pytest.mark.slow
def test_all_of_timms_optimizers_go_on_as_if_never_stopped_or_are_refused(tmp_path: Path) -> None:
    refused = set()
    for name in list_optimizers():
        try:
            Optimised(f"timm/{name}", 1)
        except BadFileError:
            refused.add(name)
            continue
        check_resumed_equals_straight(f"timm/{name}", tmp_path / name)
    other_packages = {name for name in refused if name.startswith(("bnb", "fused"))}
    assert refused - other_packages == {"adahessian", "kron", "kronc", "kronw"}


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool])
def test_a_groups_number_comes_back_as_the_tensor_that_it_was(run: RunPaths, dtype: torch.dtype) -> None:
    trainee, other = Trainee(), Trainee(seed=2)
    trainee.optimizer.param_groups[0]["count"] = torch.tensor(1.1, dtype=torch.float64).to(dtype)
    trainee.optimizer.param_groups[1]["count"] = 7
    trainee.checkpointer(run).save(trainee.state, 1, {})
    other.checkpointer(run).load_newest(other.state)
    counts = [group["count"] for group in other.optimizer.param_groups]
    assert torch.equal(counts[0], trainee.optimizer.param_groups[0]["count"])
    assert (counts[0].dtype, counts[0].device.type, counts[1]) == (dtype, "cpu", 7)


@pytest.mark.parametrize("value", [torch.ones(2), [torch.ones(())], float("inf"), object()])
def test_what_training_added_to_a_group_and_json_can_not_hold_fails(run: RunPaths, value: object) -> None:
    trainee = Trainee()
    trainee.optimizer.param_groups[0]["history"] = value
    with pytest.raises(BadFileError, match=r"^optimization\.optimizer\.name: its state 'history' is neither"):
        trainee.checkpointer(run).save(trainee.state, 1, {})


@pytest.mark.parametrize(
    ("dtypes", "value"),
    [({"step": "F31"}, 1), ({"step": "F32"}, "x"), ({"step": "F32"}, [1]), ({"other": "F32"}, 1)],
)
def test_a_forged_counter_of_a_group_is_a_clear_error(
    run: RunPaths, saved: Trainee, dtypes: dict[str, str], value: object
) -> None:
    optimizer = state_of(run)["optimizer"]
    optimizer["groups"][0] |= {"tensors": dtypes, "values": {"step": value}}
    forge(run.checkpoint(2), optimizer=optimizer)
    assert_refused(run, saved, r"state\.json: optimizer is not as hpc-train writes it")


@pytest.mark.parametrize(("is_fused", "place"), [(False, "cpu"), (True, "meta")])
def test_counters_are_on_the_device_of_the_optimizers_kernel(is_fused: bool, place: str) -> None:
    """The meta device represents a GPU: only the device is checked."""
    parameters = [torch.empty(3, device="meta"), torch.empty((), device="meta")]
    optimizer = torch.optim.AdamW(parameters)
    optimizer.param_groups[0]["fused"] = is_fused
    shapes: list[tuple[int, ...]] = [(3,), ()]
    names = ["wide", "scalar"]
    keys = {"exp_avg": shapes, "step": [(), ()]}
    tensors = {
        f"optimizer.{name}.{key}": SavedTensor("F32", of_key[i], ())
        for key, of_key in keys.items()
        for i, name in enumerate(names)
    }
    described = {
        "groups": [{"params": names, "values": {}, "tensors": {}}],
        "state": {name: {"tensors": list(keys), "values": {}} for name in names},
    }
    saved = SavedState(tensors, {}, described, {}, {})
    by_id = {id(parameter): name for parameter, name in zip(parameters, names, strict=True)}
    made = NewOptimizerState.make(optimizer, by_id, saved, Trainee().strategy.empty_like)
    assert {name: kept.tensor.device.type for name, kept in made.tensors.items()} == {
        f"optimizer.{name}.{key}": "meta" if key == "exp_avg" else place for name in names for key in keys
    }


def test_the_learning_rate_is_the_files(run: RunPaths, saved: Trainee) -> None:
    other = Trainee(seed=2)
    other.optimizer.param_groups[0]["lr"] = 0.5
    saved.optimizer.param_groups[0]["step"] = 17
    saved.checkpointer(run).save(saved.state, 3, {})
    other.checkpointer(run).load_newest(other.state)
    assert other.optimizer.param_groups[0]["lr"] == 0.5
    assert other.optimizer.param_groups[0]["step"] == 17  # what training added is state


def test_other_parameter_groups_are_refused(run: RunPaths, saved: Trainee) -> None:
    other = Trainee()
    optimizer = torch.optim.AdamW(other.model.parameters())
    with pytest.raises(BadFileError, match="parameter groups are not the checkpoint's"):
        other.checkpointer(run).load_newest(TrainingState(other.model, optimizer))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"width": 9}, r"the one in the checkpoint.*model\.first\.weight is.*and 3 more"),
        ({"dtype": torch.float64}, r"F32 \[8, 5\] in the checkpoint, F64 \[8, 5\] in the model"),
    ],
)
def test_another_model_is_refused(run: RunPaths, saved: Trainee, other: dict[str, Any], said: str) -> None:
    with pytest.raises(BadFileError, match=said):
        assert_loads(run, 2, **other)
    assert folder_names(run) == ["step-00000001", "step-00000002"]


def test_untied_weights_are_not_taken_from_a_tied_model_in_reverse(run: RunPaths, saved: Trainee) -> None:
    other = Trainee()
    untied = nn.Parameter(torch.zeros(8, 8))
    other.model.tied_b.weight = untied
    other.optimizer.param_groups[0]["params"].append(untied)
    other.checkpointer(run).save(other.state, 3, {})
    assert_refused(run, saved, r"model\.tied_b\.weight is shared with model\.tied_a\.weight")


# Damage ----------------------------------------------------------------------------------------------


def flip_a_bit(checkpoint: CheckpointPaths) -> None:
    octets = bytearray(checkpoint.shard(0).read_bytes())
    octets[-3] ^= 16
    checkpoint.shard(0).write_bytes(octets)


def point_outside(checkpoint: CheckpointPaths) -> None:
    data = json.loads(checkpoint.manifest.read_text())
    data["files"]["../../x"] = data["files"]["state.json"]
    checkpoint.manifest.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(flip_a_bit, "its hash is not the manifest's", marks=pytest.mark.fault(11)),
        pytest.param(lambda c: os.truncate(c.shard(0), 1000), "has 1000 bytes", marks=pytest.mark.fault(10)),
        pytest.param(lambda c: c.shard(0).unlink(), "is missing", marks=pytest.mark.fault(12)),
        pytest.param(lambda c: c.manifest.unlink(), "manifest.json is missing", marks=pytest.mark.fault(13)),
        (lambda c: c.manifest.write_text("garbled"), "manifest.json is not a JSON object"),
        (lambda c: c.state.write_text("{}"), "state.json has 2 bytes"),
        (point_outside, "'../../x' is not a plain file name"),
    ],
)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_used(  # type: ignore[no-untyped-def]
    run: RunPaths, saved: Trainee, damage, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(run.checkpoint(2))
    assert_loads(run, 1)
    [warning] = caplog.messages
    assert "step-00000002" in warning and said in warning
    assert folder_names(run) == ["step-00000001", "step-00000002.bad"]


@pytest.mark.fault(11)
def test_if_all_are_damaged_nothing_is_loaded_and_all_is_kept(run: RunPaths, saved: Trainee) -> None:
    for step in (1, 2):
        flip_a_bit(run.checkpoint(step))
    before = saved.everything()
    for attempt in (2, 3):  # the second finds them set aside
        begin_attempt(run, attempt)
        with pytest.raises(StorageError, match=r"--new.* step-00000001\.bad .*its hash .*step-00000002\.bad"):
            saved.checkpointer(run, attempt).load_newest(saved.state)
    assert differences(before, saved.everything()) == []
    assert folder_names(run) == ["step-00000001.bad", "step-00000002.bad"]


def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_called_damaged(
    run: RunPaths, saved: Trainee, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify_late(checkpoint: CheckpointPaths, *ranks: int) -> list[str]:
        shutil.rmtree(checkpoint.folder)  # the run has saved newer ones
        return verify(checkpoint, *ranks)

    monkeypatch.setattr(module, "verify", verify_late)
    with pytest.raises(StorageError, match=r"step-00000001 has been removed, .* try again"):
        saved.checkpointer(run).load(1, saved.state)


@pytest.mark.fault(11)
def test_one_that_was_set_aside_and_is_put_back_is_loaded(run: RunPaths, saved: Trainee) -> None:
    whole = run.checkpoint(2).shard(0).read_bytes()
    for step in (1, 2):
        flip_a_bit(run.checkpoint(step))
    begin_attempt(run, 2)
    with pytest.raises(StorageError):
        saved.checkpointer(run, 2).load_newest(saved.state)
    (run.checkpoints / "step-00000002.bad").rename(run.checkpoint(2).folder)
    run.checkpoint(2).shard(0).write_bytes(whole)
    begin_attempt(run, 3)
    assert_loads(run, 2, attempt=3)


def test_files_are_verified_while_the_optimizers_state_is_read(
    run: RunPaths, saved: Trainee, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes about as long as the other. The weights change once the files are known to be intact."""
    read, weights_when_verified = threading.Event(), []
    other = Trainee(seed=2)
    before = [parameter.detach().clone() for parameter in other.model.parameters()]

    def note(*arguments: Any) -> None:
        read_into(*arguments)
        read.set()

    def wait(*arguments: Any) -> list[str]:
        assert read.wait(LIMIT_S)
        weights_when_verified.extend(parameter.detach().clone() for parameter in other.model.parameters())
        return verify(*arguments)

    monkeypatch.setattr(module, "read_into", note)
    monkeypatch.setattr(module, "verify", wait)
    assert other.checkpointer(run).load_newest(other.state) is not None
    assert all(map(torch.equal, before, weights_when_verified)) and weights_when_verified
    assert differences(saved.everything(), other.everything()) == []


def test_a_disk_error_during_the_read_is_for_another_attempt(
    run: RunPaths, saved: Trainee, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files were intact when they were verified: nothing is set aside."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    other = Trainee(seed=2)
    monkeypatch.setattr(shards.os, "preadv", refuse)
    with pytest.raises(TransientStorageError, match=r"step-00000002: the disk reports an I/O error"):
        other.checkpointer(run).load_newest(other.state)
    assert folder_names(run) == ["step-00000001", "step-00000002"]


def test_one_that_is_removed_while_ranks_look_at_it_is_not_damaged(
    run: RunPaths, saved: Trainee, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(checkpoint: CheckpointPaths, part: int, parts: int) -> list[str]:
        if checkpoint.step == 2:
            remove(checkpoint.folder)
        return verify(checkpoint, part, parts)

    monkeypatch.setattr(module, "verify", gone)
    assert_loads(run, 1)
    assert not caplog.messages and folder_names(run) == ["step-00000001"]


def test_one_of_a_newer_version_is_refused_and_left_alone(run: RunPaths, saved: Trainee) -> None:
    manifest = run.checkpoint(2).manifest
    newer = json.loads(manifest.read_text()) | {"version": 99, "hpc_train": "9.1.0"}
    manifest.write_text(json.dumps(newer))
    assert_refused(run, saved, r"version is 99, .*use hpc-train 9\.1\.0, or a newer one")
    assert folder_names(run) == ["step-00000001", "step-00000002"]


# Forged folders: the hashes are right ------------------------------------------------------------------


class Trap:
    """Pickled, it leaves a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (Path.touch, (self.path,))


def test_without_room_for_a_checkpoint_none_is_begun(run: RunPaths, saved: Trainee) -> None:
    before = sorted(run.checkpoints.iterdir())
    with claimed_room(free=100), pytest.raises(StorageError, match=r"full: \d+ bytes are needed, 100"):
        saved.checkpointer(run).save(saved.state, 9, {})
    assert sorted(run.checkpoints.iterdir()) == before


def lying_header(checkpoint: CheckpointPaths) -> None:
    octets = checkpoint.shard(0).read_bytes()
    checkpoint.shard(0).write_bytes(struct.pack("<Q", 2**62) + octets[8:])


def lying_shape(checkpoint: CheckpointPaths) -> None:
    tensors = load_file(checkpoint.shard(0))
    tensors["model.first.weight"] = torch.zeros(5, 8)
    save_file(tensors, checkpoint.shard(0))


def missing_tensor(checkpoint: CheckpointPaths) -> None:
    tensors = load_file(checkpoint.shard(0))
    tensors["padding"] = tensors.pop("model.first.weight")
    save_file(tensors, checkpoint.shard(0))


def lying_place(checkpoint: CheckpointPaths) -> None:
    """A tensor's bytes would be those behind the file's end."""
    _change_entry(checkpoint, lambda entry: {"data_offsets": [at + 2**40 for at in entry["data_offsets"]]})


def entry_without_dtype(checkpoint: CheckpointPaths) -> None:
    _change_entry(checkpoint, lambda entry: {"other": entry.pop("dtype")})


def _change_entry(checkpoint: CheckpointPaths, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    octets = checkpoint.shard(0).read_bytes()
    length = struct.unpack("<Q", octets[:8])[0]
    header = json.loads(octets[8 : 8 + length])
    entry = header["model.first.weight"]
    entry |= changed(entry)
    text = json.dumps(header).encode()
    checkpoint.shard(0).write_bytes(struct.pack("<Q", len(text)) + text + octets[8 + length :])


@pytest.mark.fault(44)
@pytest.mark.parametrize(
    "damage", [lying_header, lying_shape, lying_place, missing_tensor, entry_without_dtype]
)
def test_a_forged_shard_is_a_clear_error(run: RunPaths, saved: Trainee, damage) -> None:  # type: ignore[no-untyped-def]
    damage(run.checkpoint(2))
    forge(run.checkpoint(2))
    assert_refused(run, saved, r"shard-00000\.safetensors: ")


@pytest.mark.fault(44)
def test_a_pickle_named_as_a_shard_runs_nothing(run: RunPaths, saved: Trainee, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    for path in (run.checkpoint(2).shard(0), run.checkpoint(1).shard(0)):
        path.write_bytes(pickle.dumps(Trap(trap)))
    forge(run.checkpoint(2), tensors={})
    assert_refused(run, saved)
    shutil.rmtree(run.checkpoint(2).folder)
    size = run.checkpoint(1).shard(0).stat().st_size
    tensors = {"model.x": {"dtype": "U8", "shape": [size], "pieces": [[0, [0], [size]]]}}
    forge(run.checkpoint(1), tensors=tensors, tied={})
    assert_refused(run, saved)
    assert not trap.exists()
    pickle.loads(pickle.dumps(Trap(trap)))
    assert trap.exists()  # it would have sprung


def state_of(run: RunPaths) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(run.checkpoint(2).state.read_text())
    return state


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [8, 5], "pieces": [[0, [0, 0], [8, 5]]]} | changes


NUMBERED = entry(pieces=[[0, [0, 0], [8, 5], 1]])


@pytest.mark.parametrize(
    "forged",
    [
        NUMBERED,
        entry(shape=[2**40, 2**20], pieces=[[0, [0, 0], [2**40, 2**20]]]),
        entry(shape=[8, 5], pieces=[[0, [0, 0], [4, 5]]]),
        entry(pieces=[[0, [0, 0], [4, 5]], [0, [0, 0], [4, 5]]]),
        entry(pieces=[[0, [4, 0], [8, 5]]]),
        entry(pieces=[[0, [0], [40]]]),
        entry(pieces=[[-1, [0, 0], [8, 5]]]),
        entry(pieces=[[7, [0, 0], [8, 5]]]),
        entry(pieces=[["../x", [0, 0], [8, 5]]]),
        entry(pieces=5),
        entry(pieces=[[0, [0, 0], [4, 5]], [0, [4, 0], [4, 5]]]),
        entry(pieces=[[0, [0, 0], [4, 5]], [0, [4, 0], [4, 5], 0]]),
        entry(pieces=[[0, [0, 0], [4, 5], 1], [0, [4, 0], [4, 5], 1]]),
        entry(pieces=[[0, [0, 0], [4, 5]], [0, [4, 0], [4, 5], -1]]),
        entry(pieces=[[0, [0, 0], [4, 5]], [0, [4, 0], [4, 5], True]]),
        entry(pieces=[[0, [0, 0], [4, 5]], [0, [4, 0], [4, 5], "../x"]]),
        entry(pieces=[[0, [0, 0], [4, 5]], [0, [4, 0], [4, 5], 1, 1]]),
        entry(dtype="PICKLE"),
        entry(dtype=[]),
        entry(shape=[-8, -5]),
        entry(shape=[0, 2**62, 2**62], pieces=[]),
        entry(shape=[0, 2**62, 2**62], pieces=[[0, [0, 0, 0], [0, 2**62, 2**62]]]),
        entry(shape=[2**70], pieces=[]),
        [],
        None,
    ],
)
def test_a_forged_table_is_a_clear_error(run: RunPaths, saved: Trainee, forged: object) -> None:
    forge(run.checkpoint(2), tensors=state_of(run)["tensors"] | {"model.first.weight": forged})
    said = r"state\.json is not as hpc-train writes it"
    if forged == NUMBERED:  # as of the second piece in a shard
        said = r"model\.first\.weight\.\.1 is not in it, though"
    assert_refused(run, saved, said)


def test_groups_come_back_in_any_order(run: RunPaths, saved: Trainee) -> None:
    saved.optimizer.param_groups[0]["count"] = 3
    saved.checkpointer(run).save(saved.state, 3, {})
    other = Trainee(seed=2)
    other.optimizer.param_groups.reverse()
    other.checkpointer(run).load_newest(other.state)
    assert [group.get("count") for group in other.optimizer.param_groups] == [None, 3]
    assert differences(saved.everything(), other.everything()) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda groups: groups[0]["params"].append(groups[1]["params"][0]),
        lambda groups: groups[0].update(rank="0"),
        lambda groups: groups[0].update(params=[[]]),
        lambda groups: groups[0]["params"].append("stranger"),
        lambda groups: groups[0]["params"].pop(),
        lambda groups: groups.pop(),
    ],
)
def test_forged_groups_are_refused(run: RunPaths, saved: Trainee, change) -> None:  # type: ignore[no-untyped-def]
    optimizer = state_of(run)["optimizer"]
    change(optimizer["groups"])
    forge(run.checkpoint(2), optimizer=optimizer)
    assert_refused(run, saved, "optimizer")


@pytest.mark.parametrize(
    "changes",
    [
        {"tensors": {}},
        {"tensors": []},
        {"optimizer": {}},
        {"optimizer": {"groups": 1, "state": 2}},
        {"optimizer": {"groups": [], "state": {}}},
        {"scaler": None},
        {"scaler": {"scale": 512.0}},
        {"scaler": SCALER | {"growth_factor": "2"}},
        {"scaler": SCALER | {"_growth_tracker": 2**62}},
        {"tied": {"model.a": "model.nothing"}},
        {"extra": 1},
        {"extra": []},
        {"extra": {"position": 5}},
        {"extra": {"position": {}}},
        {"extra": {"position": {"step": "2", "skipped": []}}},
        {"extra": {"position": {"step": -1, "skipped": []}}},
        {"extra": {"position": {"step": 2, "skipped": 3}}},
        {"extra": {"position": {"step": 2, "skipped": [[]]}}},
        {"extra": {"position": {"step": 2, "skipped": [3, 3]}}},
        {"extra": {"skips": "1"}},
        {"extra": {"skips": -1}},
        {"extra": {"versions": []}},
        {"extra": {"versions": {"torch": 2}}},
        {"extra": {"data": []}},
        {"extra": {"data": {}}},
        {"extra": {"world_size": "2"}},
        {"extra": {"world_size": 2}},
        {"extra": {"degrees": {"shard": []}}},
        {"extra": {"world_size": 2, "strategy": "ddp", "degrees": {"shard": 2}}},
        {"extra": {"world_size": 2, "strategy": "ddp", "degrees": dict.fromkeys(AXES, 0)}},
    ],
)
def test_a_forged_state_is_a_clear_error(run: RunPaths, saved: Trainee, changes: dict[str, Any]) -> None:
    forge(run.checkpoint(2), **changes)
    assert_refused(run, saved, r"state\.json is not as hpc-train writes it" if "extra" in changes else None)


@pytest.mark.parametrize(
    ("name", "other", "said"),
    [
        (
            "model.mask",
            "model.stranger",
            r"model\.mask is missing in the checkpoint; model\.stranger is not in the model",
        ),
        (
            "optimizer.first.bias.exp_avg",
            "optimizer.stranger.exp_avg",
            r"optimizer\.stranger\.exp_avg belongs to no parameter",
        ),
    ],
)
def test_names_that_the_model_has_not_are_listed(
    run: RunPaths, saved: Trainee, name: str, other: str, said: str
) -> None:
    tensors = state_of(run)["tensors"]
    tensors[other] = tensors.pop(name)
    forge(run.checkpoint(2), tensors=tensors)
    with pytest.raises(BadFileError, match=said):
        saved.checkpointer(run).load_newest(saved.state)


def test_what_cannot_be_json_fails_the_save_and_leaves_nothing(run: RunPaths) -> None:
    trainee = Trainee()
    with pytest.raises(TypeError):
        trainee.checkpointer(run).save(trainee.state, 1, {"position": object()})
    assert folder_names(run) == []


# Dealing -----------------------------------------------------------------------------------------------


def test_dealing_gives_all_ranks_about_the_same_bytes() -> None:
    sizes = {f"layer{i}": 1000 + 37 * i for i in range(40)}
    holders = dict.fromkeys(sizes, range(7))
    owners = deal(sizes, holders)
    loads = [sum(size for name, size in sizes.items() if owners[name] == rank) for rank in range(7)]
    assert max(loads) - min(loads) <= max(sizes.values())
    assert owners == deal(dict(reversed(sizes.items())), holders)


def test_several_ranks_need_a_group(run: RunPaths) -> None:
    with pytest.raises(AssertionError, match="process group"):
        Checkpointer(run, 1, Trainee().strategy, 0, 2, None)


def test_a_tensor_is_copied_whatever_its_layout(run: RunPaths) -> None:
    trainee, other = Trainee(), Trainee(seed=2)
    weight: Tensor = trainee.model.conv.weight
    assert not weight.is_contiguous()  # channels_last
    trainee.checkpointer(run).save(trainee.state, 1, {})
    other.checkpointer(run).load_newest(other.state)
    assert torch.equal(other.model.conv.weight, weight)
    assert other.model.conv.weight.stride() == weight.stride()
