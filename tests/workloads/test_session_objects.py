"""``session.load_state``, ``end_step`` and ``metric``: what a script resumes with, and what ends it."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from hpc_train import session
from hpc_train.errors import BadFileError
from hpc_train.paths import RunPaths
from hpc_train.run.checkpoints import committed, find_step
from hpc_train.run.files import write_json
from hpc_train.session import storage
from hpc_train.session.objects import restore, staged

STEPS = 12


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Begin a session, as a new process does; ``settings``: the launcher's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session.SessionState, "handle_signals", lambda self: None)

    def new(rank: int = 0, ranks: int = 1, *, launched: bool = False, **settings: Any) -> None:
        for name, value in {"RANK": rank, "WORLD_SIZE": ranks}.items():
            monkeypatch.setenv(name, str(value))
        if launched:
            monkeypatch.setenv("HPC_TRAIN_RUN", str(tmp_path))
            (tmp_path / "attempts" / "1").mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("HPC_TRAIN_SESSION", json.dumps(settings))
        monkeypatch.setattr(session, "_session", session.SessionState())

    new()
    yield new
    if session._session._saving is not None:
        session._session._saving._failure = None


def save(step: int) -> None:
    """Save the objects of ``load_state``, and wait for it."""
    session.save_state(step)
    session._session.saving.wait()


def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def train(stop_after: int | None = None) -> dict[str, Any]:
    """Train with dropout, shuffling and augmentation by three generators; return everything that matters."""
    seed()
    data = torch.arange(80.0).view(20, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.8, 0.9))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS)
    sampler = session.sampler(data, global_batch_size=4)
    loader = DataLoader(TensorDataset(data), batch_size=4, sampler=sampler)
    counters: dict[Any, Any] = {"losses": [], 1: (2.0, b"x")}
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
    step = session.load_state(**objects, counters=counters)
    while step < STEPS:
        for (batch,) in loader:
            noise = random.random() + float(np.random.rand())
            loss = (model(batch) + noise).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            counters["losses"].append(loss.item())
            session._session.is_stopping = step == stop_after
            if session.end_step(step, STEPS, save_every=2):
                return {}
            if step == STEPS:
                break
    state = {name: value.tolist() for name, value in model.state_dict().items()}
    return {"weights": state, "counters": counters, "random": [random.random(), torch.rand(1).item()]}


@pytest.mark.parametrize("stop_after", [3, 5])
def test_a_script_resumes_bitwise_in_the_middle_and_at_the_end_of_an_epoch(
    begin: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_after: int
) -> None:
    resumed_folder = tmp_path / "resumed"
    resumed_folder.mkdir()
    plain = train()
    monkeypatch.chdir(resumed_folder)
    for stop in (stop_after, stop_after + 2):
        begin()
        assert train(stop) == {}
    begin()
    assert train() == plain and len(plain["counters"]["losses"]) == STEPS


def test_a_checkpoint_has_no_names_of_wrappers(begin: Callable[..., None], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        compiled = nn.Sequential(cast(nn.Module, torch.compile(nn.Linear(2, 2))))
        session.load_state(model=torch.compile(DistributedDataParallel(compiled)))
        save(1)
    finally:
        dist.destroy_process_group()
    file = tmp_path / "checkpoints" / "step-00000001" / "state-0.safetensors"
    assert {"model.0.weight", "model.0.bias"} <= load_file(file).keys()
    begin()
    bare = nn.Sequential(nn.Linear(2, 2))
    assert session.load_state(model=bare) == 1
    assert torch.equal(bare.get_parameter("0.weight"), load_file(file)["model.0.weight"])


def test_each_rank_has_its_own_generators_and_further_ranks_derive_theirs(tmp_path: Path) -> None:
    numbers = []
    for rank in range(2):
        torch.manual_seed(rank)
        staged(7, {}, rank)(tmp_path)
        numbers.append(torch.rand(1).item())
    restored = []
    for rank in (0, 1, 2, 3, 2):
        assert restore(tmp_path, {}, rank, 4) == 7
        restored.append(torch.rand(1).item())
    assert restored[:2] == numbers and restored[4] == restored[2]
    assert len(set(restored)) == 4


def test_tied_weights_are_written_once_and_temporary_tensors_are_not_mixed_up(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    first, second = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    expected = [torch.Generator().manual_seed(number).get_state() for number in (1, 2)]
    staged(1, {"model": model, "first": first, "second": second}, 0)(tmp_path)
    copies = {"first": torch.Generator(), "second": torch.Generator()}
    restore(tmp_path, {"model": model, **copies}, 0, 1)
    assert all(torch.equal(a.get_state(), b) for a, b in zip(copies.values(), expected, strict=True))
    text = (tmp_path / "state-0.safetensors").read_bytes().partition(b'"__metadata__"')[2]
    assert text.count(b'"model.1.weight":{"dtype"') == 0


@pytest.mark.parametrize("value", [
    float("nan"), [1, "a", None, True], {"a": {2: (3, [4.5])}}, {1, 2}, b"\x00\xff",
    np.arange(6).reshape(2, 3), np.float32(0.1), torch.bfloat16, torch.device("cpu"),
    torch.tensor([1 + 2j]), torch.zeros(0, 3),
    {"$": "dict"},
    {"a.b": torch.tensor(1.0), "a": {"b": torch.tensor(2.0)}, 1: torch.ones(1), "1": torch.ones(2)},
])  # fmt: skip
def test_values_come_back_as_they_were(tmp_path: Path, value: Any) -> None:
    staged(1, {"extra": {"value": value}}, 0)(tmp_path)
    extra: dict[str, Any] = {"other": 1}
    restore(tmp_path, {"extra": extra}, 0, 1)
    assert repr(extra) == repr({"value": value})


def test_an_object_per_rank_is_restored_on_the_same_rank(tmp_path: Path) -> None:
    for rank in (0, 1):
        buffer = {"samples": torch.full((2,), float(rank)), "places": [rank]}
        staged(7, {"buffer": session.per_rank(buffer), "counters": {"rank": rank}}, rank)(tmp_path)
    for rank in (0, 1):
        objects: dict[str, Any] = {"buffer": session.per_rank({}), "counters": {}}
        assert restore(tmp_path, objects, rank, 2) == 7
        assert objects["counters"] == {"rank": 0}
        assert repr(objects["buffer"].value) == repr(
            {"samples": torch.full((2,), float(rank)), "places": [rank]}
        )
    with pytest.raises(BadFileError, match=r"buffer differs between ranks, and .* for 2 ranks, not for 3"):
        restore(tmp_path, {"buffer": session.per_rank({})}, 0, 3)
    with pytest.raises(BadFileError, match=r"buffer is not per rank, but in .* write session\.per_rank"):
        restore(tmp_path, {"buffer": {}}, 0, 2)
    with pytest.raises(BadFileError, match=r"counters is per rank, but not in .* omit session\.per_rank"):
        restore(tmp_path, {"counters": session.per_rank({})}, 0, 2)
    assert restore(tmp_path, {"counters": {}}, 0, 3) == 7  # the buffer is not wanted any more


class Sharded(nn.Linear):
    """Has the name of a wrapper that distributes the weights."""


Sharded.__name__ = "FullyShardedDataParallel"


@pytest.mark.parametrize(("objects", "message"), [
    ({"best": 0.5}, r"best is a float .* put it into a dict"),
    ({"model": nn.Sequential(Sharded(1, 1))}, r"model is sharded .* torch.distributed.checkpoint"),
])  # fmt: skip
def test_objects_that_cannot_be_restored_are_refused_at_the_start(
    begin: Callable[..., None], objects: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        session.load_state(**objects)


def test_an_object_of_an_unknown_class_is_named(begin: Callable[..., None]) -> None:
    session.load_state(extra={"a": [object()]})
    with pytest.raises(TypeError, match=r"extra\.a\.0 is a object, which can't be saved"):
        session.save_state(1)


def test_what_a_checkpoint_lacks_is_an_error(begin: Callable[..., None]) -> None:
    session.load_state(counters={})
    save(1)
    with pytest.raises(BadFileError, match="has no model, only counters"):
        session.load_state(model=nn.Linear(1, 1))
    with session.checkpoint(2) as folder:
        (folder / "own.pt").touch()
    with pytest.raises(BadFileError, match=r"written within session\.checkpoint"):
        session.load_state(counters={})


def test_a_sampler_of_other_batches_is_refused(begin: Callable[..., None]) -> None:
    session.load_state(sampler=session.sampler(range(20), global_batch_size=4))
    save(1)
    with pytest.raises(BadFileError, match="other samples"):
        session.load_state(sampler=session.sampler(range(20), global_batch_size=2))


def test_a_failed_write_is_raised_at_the_next_call(
    begin: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    session.load_state(counters={})
    monkeypatch.setattr(storage.Saving, "commit", fail)
    session.save_state(1)
    for thread in threading.enumerate():
        if thread.name.startswith("save of"):
            thread.join()
    with pytest.raises(OSError, match="the disk is full"):
        session.end_step(2)


def test_a_save_does_not_see_later_changes(
    begin: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, commit = threading.Event(), storage.Saving.begin
    monkeypatch.setattr(storage.Saving, "begin", lambda self, step: may_write.wait() and commit(self, step))
    weight, counters = nn.Linear(1, 1), {"list": [1]}
    session.load_state(model=weight, counters=counters)
    before = weight.weight.item()
    session.save_state(1)
    with torch.no_grad():
        weight.weight += 1
    counters["list"].append(2)
    may_write.set()
    session._session.saving.wait()
    begin()
    assert session.load_state(model=weight, counters=counters) == 1
    assert weight.weight.item() == before and counters == {"list": [1]}


def test_end_step_needs_the_objects(begin: Callable[..., None]) -> None:
    with pytest.raises(RuntimeError, match=r"call session\.load_state"):
        session.end_step(1)


BEST = {"metric": "accuracy", "mode": "max"}
STOPPING = BEST | {"patience": 2, "median_after": None, "min_delta": 0.0}


def evaluate(accuracies: list[float], step: int = 0) -> int:
    """Evaluate after each step until the session ends the script; return the last step."""
    for accuracy in accuracies:
        step += 1
        session.metric(step, accuracy=accuracy)
        if session.end_step(step):
            break
    return step


def test_the_best_checkpoint_is_saved_and_kept(begin: Callable[..., None], tmp_path: Path) -> None:
    begin(launched=True, keep=2, best=BEST, every_steps=2)
    write_json(tmp_path / "attempts" / "1" / "attempt.json", {"version": 1})
    session.load_state(counters={})
    evaluate([0.1, 0.5, 0.9, 0.2, 0.3, 0.3, 0.8, 0.1])
    session._session.saving.wait()
    run = RunPaths(tmp_path)
    assert [checkpoint.step for checkpoint in committed(run)] == [8, 6, 3]
    assert find_step(run, best=True) == 3


def test_early_stopping_ends_the_script_and_a_resume_counts_on(begin: Callable[..., None]) -> None:
    settings = {"early_stopping": STOPPING, "every_steps": 2}
    begin(**settings)
    session.load_state(counters={})
    assert evaluate([0.5, 0.4]) == 2
    session._session.saving.wait()
    begin(**settings)
    assert session.load_state(counters={}) == 2
    assert evaluate([0.3, 0.9], step=2) == 3
    assert session._session.selection.reason == (
        "stopped early: no better accuracy in 2 evaluations (accuracy 0.5 at step 1)"
    )
    begin(early_stopping=STOPPING | {"patience": 4})  # changed at the resume
    session.load_state(counters={})
    assert evaluate([0.1, 0.1, 0.1], step=3) == 5


def test_a_script_killed_between_early_stoppings_save_and_its_end_trains_no_further_step(
    begin: Callable[..., None],
) -> None:
    settings = {"early_stopping": STOPPING, "launched": True}
    begin(**settings)
    state = {"steps": 0}

    def run(first: int) -> int:
        for step in range(first + 1, 9):
            state["steps"] += 1
            session.log(step, loss=1.0)
            session.metric(step, accuracy=0.5)
            if session.end_step(step, 20):
                return step
        return 0

    assert run(session.load_state(state=state)) == 3
    write_json(Path("attempts/1/attempt.json"), {"version": 1})
    begin(**settings)
    assert session.load_state(state=state) == 3
    assert run(3) == 4 and state == {"steps": 3}
    assert session._session._rows == [] and [path.name for path in Path("checkpoints").iterdir()] == [
        "step-00000003"
    ]
    session._session._messages.flush()
    messages = [
        json.loads(line) for line in Path("attempts/1/rank-0.session").read_text().split("\n") if line
    ]
    assert [message[1] for message in messages if message[0] == "finished"] == [3, 4]
    assert max(step for kind, *rest in messages if kind == "rows" for _, step, *_ in rest[0]) == 3


def test_a_metric_that_the_file_names_must_be_there(begin: Callable[..., None]) -> None:
    begin(best=BEST)
    with pytest.raises(ValueError, match=r"checkpoint\.best\.metric: accuracy is not among .*: loss"):
        session.metric(1, loss=0.5)


@pytest.mark.parametrize("name", ["time", "attempt", "step"])
def test_columns_of_rows_are_no_metrics(begin: Callable[..., None], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is a column"):
        session.log(1, **cast(Any, {name: 1.0}))
