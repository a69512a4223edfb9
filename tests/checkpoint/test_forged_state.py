"""A forged ``state.json`` under a true manifest: each value is refused, or does no harm."""

from __future__ import annotations

import copy
import json
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import timm.optim
import torch

from hpc_train.errors import BadFileError, UserError
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.paths import RunPaths
from hpc_train.run import versions
from hpc_train.run.checkpoints import verify
from hpc_train.training.checkpoint.export import export
from hpc_train.training.resuming import conditions
from tests.checkpoint.checkpoint_runs import Trainee, forge, make_run
from tests.training.resumes import resume

Place = tuple[str | int, ...]

_MISSING = object()
#: What is put in each value's place.
FORGERIES: list[Any] = [
    _MISSING, None, True, -1, 2**62, 10**400, float("nan"), "x", [], {}, [0, 2**62, 2**62],
    [[[[[1]]]]], {"x": {"x": [1]}},
]  # fmt: skip
#: Else each place gets every other value.
_TRIES_ALL = os.environ.get("HPC_TRAIN_ALL_PARALLEL") == "1"
#: Keys that represent all of their object: a matrix, a number and an empty tensor; one of each other kind.
_SAMPLES: dict[str, set[str]] = {
    "tensors": {"model.first.weight", "model.norm.num_batches_tracked", "model.none"},
    "state": {"first.bias"},
    "values": {"lr", "step", "RMS"},
    "versions": {"torch"},
    "degrees": {"pipeline"},
}
#: What a process may allocate more while it reads a forged checkpoint of some kilobytes.
_ROOM = 2 << 30


def trainee(optimizer: str) -> Trainee:
    """Return a trainee whose optimizer counts steps in a tensor, in its group or in a state's plain value."""
    made = Trainee()
    if optimizer != "adamw":
        kind = {"lamb": timm.optim.Lamb, "adafactor": timm.optim.Adafactor}[optimizer]
        made.optimizer = kind([{"params": group["params"]} for group in made.optimizer.param_groups], lr=0.01)
    made.state = replace(made.state, optimizer=made.optimizer)
    return made


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    run = make_run(tmp_path / "run")
    run.run.write_text('{"id": "0123456789"}')
    return run


@pytest.fixture
def little_memory() -> Iterator[None]:
    """An allocation that no file of the checkpoint justifies fails, instead of going unnoticed."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def extra() -> dict[str, Any]:
    return {
        "position": {"step": 1, "skipped": [0]},
        "skips": 0,
        "seed": 0,
        "data": None,
        "hardware": {"processor": "some", "threads": [1]},
        "versions": versions.versions() | {"torch": "0.0.1"},
        **conditions(1, "fsdp", Degrees(pipeline=2)),
    }


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Yield the place of each key and item, folders before what is in them."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if is_sample(*at, key):
            yield (*at, key)
            yield from places(item, (*at, key))


def is_sample(*place: str | int) -> bool:
    *_, within, key = ("", *place)
    if isinstance(key, int):
        return key == 0 or within not in ("groups", "params")
    return key in _SAMPLES.get(str(within), {key})


def forged(data: dict[str, Any], place: Place, value: object) -> dict[str, Any]:
    changed = copy.deepcopy(data)
    inner: Any = changed
    for key in place[:-1]:
        inner = inner[key]
    if value is _MISSING:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return changed


def load(made: Trainee, run: RunPaths) -> None:
    """Resume as a rank does, and train a step."""
    found = resume(made.checkpointer(run), made.state, batchnorm=True)
    next(found.position.windows())
    assert found.skips + 1
    scaler = made.state.scaler
    assert scaler is not None
    scaler.scale(torch.ones(()))
    if isinstance(made.optimizer, torch.optim.AdamW):  # others keep plain numbers that only they know
        made.train(1)


def problem(act: Callable[[], object]) -> str | None:
    """Return what ``act`` raised that is no message for the user."""
    try:
        act()
    except UserError:
        return None
    except Exception as error:
        return repr(error)
    return None


@pytest.mark.slow
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "adafactor"])
def test_each_forged_value_is_refused_or_harmless(
    run: RunPaths, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainee(optimizer)
    made.train(1)
    made.checkpointer(run).save(made.state, 1, extra())
    for module, costly in ((os, "fsync"), (versions, "versions")):
        monkeypatch.setattr(module, costly, cache(getattr(module, costly)))
    checkpoint, target = run.checkpoint(1), run.folder.parent / "out.safetensors"
    data = json.loads(checkpoint.state.read_text())
    load(trainee(optimizer), run)
    wrong = []
    given = data if optimizer == "adamw" else {"optimizer": data["optimizer"]}
    for number, place in enumerate(places(given)):
        for value in FORGERIES if _TRIES_ALL else FORGERIES[number % 2 :: 2]:
            checkpoint.state.write_text(json.dumps(forged(data, place, value)))
            forge(checkpoint)
            acts: list[Callable[[], object]] = [partial(load, trainee(optimizer), run)]
            if place[0] in ("tensors", "tied"):
                acts += [partial(verify, checkpoint), partial(export, run, target)]
            wrong += [f"{place} = {str(value)[:30]}: {raised}" for act in acts if (raised := problem(act))]
    assert wrong == []


@pytest.mark.parametrize("optimizer", ["lamb", "adafactor"])
@pytest.mark.parametrize("step", [None, -1, 10**400, float("nan"), "x", [], {}])
def test_a_count_of_steps_that_is_none_is_refused(run: RunPaths, optimizer: str, step: object) -> None:
    made = trainee(optimizer)
    made.train(1)
    made.checkpointer(run).save(made.state, 1, extra())
    data = json.loads(run.checkpoint(1).state.read_text())["optimizer"]
    inner = data["groups"][0] if optimizer == "lamb" else data["state"]["first.bias"]
    assert inner["values"]["step"] == 1
    inner["values"]["step"] = step
    forge(run.checkpoint(1), optimizer=data)
    with pytest.raises(BadFileError, match=r"optimizer is not as hpc-train writes it: .*step is"):
        load(trainee(optimizer), run)
