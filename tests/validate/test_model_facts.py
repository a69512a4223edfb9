from __future__ import annotations

import inspect
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from hpc_train.experiment.validate import model_facts
from hpc_train.experiment.validate.child_process import one_child
from hpc_train.experiment.validate.layer_rules import layer_facts
from hpc_train.experiment.validate.optimizer_rules import TORCH_OPTIMIZERS, UNUSABLE_OPTIMIZERS
from hpc_train.training import optimization
from tests.end_to_end.runs import wait_for


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HPC_TRAIN_CACHE", str(tmp_path / "cache"))
    forget()
    yield
    monkeypatch.undo()  # a test may have replaced what is forgotten
    forget()


def forget() -> None:
    model_facts._answer.cache_clear()
    model_facts._refusals.clear()


Child = Callable[[str], Path]
Context = AbstractContextManager[None]


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Child:
    """Return what puts a shell script in Python's place; it notes its calls in the file that is returned."""
    calls, program = tmp_path / "calls", tmp_path / "python"

    def put(script: str) -> Path:
        program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setattr("sys.executable", str(program))
        return calls

    return put


YES = '{"result": {"has_batchnorm": true}}'
ANSWER = """echo '{"result": {"timm": ["resnet50"], "torchvision": [], "datasets": ["MNIST"]}}'"""


def test_the_child_is_asked_once_and_its_answer_kept(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = child(ANSWER)
    assert model_facts.known_names("timm") == ["resnet50"]
    forget()
    assert model_facts.known_names("datasets") == ["MNIST"]
    assert calls.read_text() == "-m hpc_train.experiment.validate.child_process\n"
    (file,) = (tmp_path / "cache").iterdir()
    assert file.suffix == ".json"
    file.write_text("{")
    forget()
    assert model_facts.known_names("timm") == ["resnet50"], "asked again, since the cache is damaged"
    assert json.loads(file.read_text())["timm"] == ["resnet50"]
    monkeypatch.setattr(model_facts, "version", lambda package: f"9.{package}")
    forget()
    model_facts.known_names("timm")
    assert len(calls.read_text().splitlines()) == 3, "of other versions"


@pytest.mark.parametrize(
    "script",
    [
        "exit 1",
        "echo broken",
        "echo '[1]'",
        """echo '{"result": 3}'""",
        """echo '{"result": {"timm": 3}}'""",
        "kill -9 $$",
        "printf '\\377'",
    ],
)
def test_a_failing_child_makes_names_unknown(child: Child, script: str) -> None:
    child(script)
    assert model_facts.known_names("timm") is None
    assert model_facts.has_batchnorm("timm/resnet50", {}) is None
    assert layer_facts("timm/resnet50", {}) is None


def test_a_child_that_hangs_is_given_up(
    child: Child, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    child("exec tail -f /dev/null")
    monkeypatch.setattr(model_facts, "CHILD_LIMIT_S", 0.2)
    assert model_facts.known_names("timm") is None
    assert model_facts.has_batchnorm("timm/resnet50", {}) is None
    assert all("timed out after 0.2 seconds" in said for said in caplog.messages), caplog.messages
    assert len(caplog.messages) == 2


@pytest.fixture
def handles_ctrl_c() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, whatever an earlier test has left in this process."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("handles_ctrl_c")
def test_ctrl_c_leaves_nothing_to_wait_for(child: Child) -> None:
    child(f"read question; kill -INT {os.getpid()}; exec tail -f /dev/null")
    before = {*threading.enumerate()}  # a thread of an earlier test may end meanwhile
    with pytest.raises(KeyboardInterrupt):
        model_facts.has_batchnorm("timm/resnet50", {})
    timers = [thread for thread in {*threading.enumerate()} - before if isinstance(thread, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers), "it would be waited for until the limit"


def test_a_cache_that_can_not_be_written_or_read_is_done_without(child: Child, tmp_path: Path) -> None:
    child(ANSWER)
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert model_facts.known_names("timm") == ["resnet50"]


def test_a_plug_ins_model_is_not_asked_for(child: Child, tmp_path: Path) -> None:
    calls = child(f"""read question; echo "$question" >> {tmp_path / "calls"}; echo '{YES}'""")
    assert model_facts.has_batchnorm("acme.models:tiny", {}) is None
    assert not calls.exists()
    assert model_facts.has_batchnorm("timm/resnet50", {"depth": 2}) is True
    assert layer_facts("timm/resnet50", {"depth": 2}) is None
    started, question = calls.read_text().splitlines()
    assert started == "-m hpc_train.experiment.validate.child_process"
    assert json.loads(question)["arguments"] == ["timm/resnet50", {"depth": 2}]


@pytest.mark.parametrize(
    ("script", "within", "children"),
    [
        (f"while read question; do echo '{YES}'; done", nullcontext, 3),
        (f"while read question; do echo '{YES}'; done", one_child, 1),
        (f"read question; echo '{YES}'", one_child, 3),  # it has ended
    ],
)
def test_within_a_sweep_one_child_answers_while_it_lives(
    child: Child, tmp_path: Path, script: str, within: Callable[[], Context], children: int
) -> None:
    calls = child(f"echo $$ >> {tmp_path / 'ids'}; {script}")
    with within():
        for model in ("timm/a", "timm/b", "timm/c"):
            assert model_facts.has_batchnorm(model, {}) is True
            if script.startswith("read"):
                wait_for(lambda: not is_alive(last_id(tmp_path)), "the child's end")
    assert len(calls.read_text().splitlines()) == children
    assert not is_alive(last_id(tmp_path)), "none is left behind"


def last_id(folder: Path) -> int:
    return int((folder / "ids").read_text().split()[-1])


def is_alive(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_model_that_can_not_be_built_is_unknown_and_the_others_are_not(
    child: Child, caplog: pytest.LogCaptureFixture
) -> None:
    child(f"""read a; echo '{{"error": "no model b"}}'; read b; echo '{YES}'; read c""")
    with one_child():
        assert model_facts.has_batchnorm("timm/bad", {}) is None
        assert model_facts.has_batchnorm("timm/good", {}) is True
    assert caplog.messages == ["names could not be checked: no model b"]


def test_one_question_about_a_model_answers_all(child: Child) -> None:
    facts = {"shared": {"heads of attn (num_heads)": 3}, "dropout_key": None, "most_stages": 12}
    calls = child(f"echo '{json.dumps({'result': {'has_batchnorm': False} | facts})}'")
    assert model_facts.has_batchnorm("timm/vit", {}) is False
    forget()
    found = layer_facts("timm/vit", {})
    assert found is not None and found.model_dump() == facts
    assert layer_facts("acme.models:tiny", {}) is None
    assert len(calls.read_text().splitlines()) == 1


@pytest.mark.slow
def test_the_real_child_knows_timm_and_torchvision() -> None:
    known = {kind: model_facts.known_names(kind) or [] for kind in ("timm", "torchvision", "datasets")}
    for kind, name in (("timm", "resnet50"), ("torchvision", "resnet50"), ("datasets", "CIFAR10")):
        assert name in known[kind]
    assert model_facts.has_batchnorm("timm/resnet18", {}) is True
    facts = layer_facts("timm/resnet18", {})
    assert facts is not None and not facts.shared and facts.most_stages == 8


def test_the_lists_kept_by_hand_are_those_of_torch_and_of_the_engine() -> None:
    assert set(TORCH_OPTIMIZERS) >= optimization._torch_classes().keys()
    assert not UNUSABLE_OPTIMIZERS.keys() & set(TORCH_OPTIMIZERS)
    for name, kind in optimization._torch_classes().items():
        arguments = inspect.signature(kind).parameters.keys() - {"params", "lr"}
        assert set(TORCH_OPTIMIZERS[name].split()) == arguments, name


def test_that_names_were_not_checked_is_said(child: Child, caplog: pytest.LogCaptureFixture) -> None:
    child("echo 'ImportError: no libcuda' >&2; exit 1")
    model_facts.known_names("timm")
    assert caplog.messages == ["names could not be checked: ImportError: no libcuda"]
