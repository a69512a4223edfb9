"""``prepare`` on a machine without a network."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from hpc_train.cli import validate
from hpc_train.experiment.validate.child_process import Child, ChildError
from tests.cli.commands import hpc_train

_EXPERIMENT = """\
name: digits
task: classification
model: {name: timm/resnet18, pretrained: true}
data: {name: digits}
optimization: {epochs: 2, global_batch_size: 64, micro_batch_size: 16, optimizer: {name: sgd, lr: 0.1}}
"""


@pytest.fixture(autouse=True)
def _without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection can be made; caches are empty, and a child process would be noticed."""
    monkeypatch.chdir(tmp_path)
    Path("exp.yaml").write_text(_EXPERIMENT, encoding="utf-8")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "0")
    for name in ("HF_HUB_CACHE", "HF_ENDPOINT", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(socket, "create_connection", _refuse)
    monkeypatch.setattr(validate, "run_child", lambda *arguments: 0)
    # What no earlier command has looked up needs a process that imports torch, which takes seconds.
    monkeypatch.setenv("HPC_TRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Child, "call", _noted_call)
    _calls.clear()


_calls: list[str] = []


def _noted_call(child: Child, function: str, *arguments: object, limit_s: float) -> object:
    _calls.append(function)
    raise ChildError("no child here")


def _refuse(place: tuple[str, int], limit_s: float) -> socket.socket:
    raise OSError(f"no route to {place[0]}:{place[1]}")


@pytest.mark.parametrize(
    ("overrides", "key", "place"),
    [
        ([], "exp.yaml:3:42: model.pretrained", "huggingface.co:443"),
        (["model.name=torchvision/resnet18"], "model.pretrained", "download.pytorch.org:443"),
        (["model.name=hf/google/vit-base-patch16-224"], "model.name", "huggingface.co:443"),
        (["model.pretrained=false", "data={name: torchvision/CIFAR10, root: data}"], "data.root", ":443"),
    ],
)
def test_what_can_not_be_fetched_ends_prepare_at_once(overrides: list[str], key: str, place: str) -> None:
    done = hpc_train("prepare", "exp.yaml", *overrides)
    assert done.code == 65
    assert f"{key}: run `hpc-train prepare exp.yaml` on a machine with network; " in done.err
    assert "can't be reached from here (no route to" in done.err and place in done.err
    assert not _calls


def test_servers_that_do_not_answer_are_waited_for_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, all_wait = [], threading.Event()

    def wait_for_all(place: tuple[str, int], limit_s: float) -> socket.socket:
        waiting.append(place[0])
        if len(waiting) == 2:
            all_wait.set()
        assert all_wait.wait(60)
        raise OSError("no answer")

    monkeypatch.setattr(socket, "create_connection", wait_for_all)
    monkeypatch.setattr(validate, "_LIMIT_S", 60.0)
    data = "data={name: huggingface/cifar10, root: data}"
    done = hpc_train("prepare", "exp.yaml", "model.name=torchvision/resnet18", data)
    assert done.err.count("run `hpc-train prepare exp.yaml` on a machine with network; ") == 2, done.err
    assert sorted(waiting) == ["download.pytorch.org", "huggingface.co"] and not _calls


def test_other_problems_are_reported_first_and_names_once_they_are_looked_up() -> None:
    done = hpc_train("prepare", "exp.yaml", "optimization.global_batch_size=65")
    assert "optimization.global_batch_size: 65" in done.err and "machine with network" not in done.err
    assert _calls


@pytest.mark.parametrize(
    ("override", "offline"),
    [
        ("model.name=timm/eva02_tiny_patch14_224", "1"),  # its repository is not named for the model
        ("model.name=timm/resnet18", "1"),  # may be in the cache
        ("model.pretrained=false", "0"),  # needs no network
    ],
)
def test_what_may_be_in_a_cache_is_tried_without_retries(tmp_path: Path, override: str, offline: str) -> None:
    (tmp_path / "hf" / "hub" / "models--timm--resnet18.a1_in1k").mkdir(parents=True)
    assert hpc_train("prepare", "exp.yaml", override).code == 0
    assert os.environ["HF_HUB_OFFLINE"] == offline


def test_a_mirror_and_a_proxy_are_what_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror:8080")
    assert "no route to mirror:8080" in hpc_train("prepare", "exp.yaml").err
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert "no route to proxy:3128" in hpc_train("prepare", "exp.yaml").err
