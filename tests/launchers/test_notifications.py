"""A webhook receives one message per end of an attempt, and nothing that it does affects the run."""

from __future__ import annotations

import errno
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

import pytest

from hpc_train.cli.doctor import _webhook
from hpc_train.errors import BadFileError, ExitCode, StorageError
from hpc_train.launchers import notifications
from hpc_train.launchers.base import LaunchRequest, StartRequest
from hpc_train.launchers.following import FollowingLauncher
from hpc_train.launchers.notifications import notify_end, read_webhook, settings_file
from hpc_train.paths import RunPaths
from hpc_train.run.run_status import RunStatus, read_status, write_status
from tests.cli.commands import hpc_train
from tests.launchers.slurm.test_after import Batch, stop, submitted_run
from tests.run.runs import small_experiment, small_run
from tests.waiting import HANG_LIMIT_S, came_true

SECRET = "T0secret0path"
LIMIT_S = HANG_LIMIT_S


@dataclass
class Receiver:
    """A webhook's server. ``status`` is its answer; ``hangs``: it answers a byte a second instead."""

    url: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    hangs: bool = False


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver, is_over = Receiver(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.messages.append(json.loads(body))
            if receiver.hangs:
                while not is_over.wait(0.1):
                    self.wfile.write(b"H")
                return
            self.send_response(receiver.status)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_port}/{SECRET}"
    yield receiver
    is_over.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def _own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> str:
    """For tests of what is posted, on a busy machine; the line for the settings."""
    monkeypatch.setattr(notifications, "_REQUEUED_LIMIT_S", LIMIT_S)
    monkeypatch.setattr(notifications, "_WHOLE_REQUEUED_LIMIT_S", LIMIT_S)
    return "timeout_s: 30\n"


def configure(text: str, mode: int = 0o600) -> Path:
    path = settings_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    batch = Batch(*submitted_run(tmp_path, slurm={"time_limit": "2h"}))
    batch.begin()
    return batch


def test_a_batch_job_reports_its_ends(
    batch: Batch, receiver: Receiver, unhurried: str, capfd: pytest.CaptureFixture[str]
) -> None:
    configure(f"webhook: {receiver.url}\nevents: [completed, failed, requeued]\n{unhurried}")
    write_status(batch.paths, RunStatus("running", 6, 10, attempt=1))
    stop(batch, "SIGTERM", 1)
    batch.begin(restart=1)
    batch.rank(1, 77, "NonFiniteError: the <!channel> loss of @all\n")
    assert batch.after(77).startswith("stop ")
    write_status(batch.paths, RunStatus("completed", 10, 10, attempt=2))
    batch.after(0)
    requeued, failed, completed = receiver.messages
    name = batch.paths.folder.name
    assert requeued["text"].endswith(f"/{name} requeued at step 6 of 10: preempted at step 6")
    assert [each["event"] for each in receiver.messages] == ["requeued", "failed", "completed"]
    assert failed["run"] == name and failed["attempt"] == 2 and "<!channel>" in failed["reason"]
    assert "&lt;!channel&gt; loss of @\u200ball" in failed["text"] and "@all" not in failed["content"]
    assert completed["content"].endswith(f"/{name} completed at step 10 of 10")
    for path in batch.paths.folder.parent.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()
    assert SECRET not in "".join(capfd.readouterr())


def test_only_the_chosen_events_are_reported(batch: Batch, receiver: Receiver) -> None:
    configure(f"webhook: {receiver.url}\n")
    stop(batch, "SIGTERM", 1)
    assert receiver.messages == []


def _full(*_: object, **_facts: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_run_that_has_filled_its_disk_reports_that(
    batch: Batch, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    configure(f"webhook: {receiver.url}\n")
    batch.rank(0, 74, "StorageError: /runs/x: the disk is full\n")
    monkeypatch.setattr("hpc_train.run.attempts.write_record", _full)
    monkeypatch.setattr("hpc_train.launchers.slurm.after.write_status", _full)
    assert batch.after(74) == "stop 74"
    (message,) = receiver.messages
    assert message["event"] == "failed" and "the disk is full" in message["reason"]
    told = capfd.readouterr().err
    assert "failed: StorageError: /runs/x: the disk is full" in told
    assert f"how the attempt ended can't be written: {batch.paths.folder}: the disk is full" in told


def test_begin_reports_a_full_disk(batch: Batch, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(f"webhook: {receiver.url}\n")
    monkeypatch.setattr("hpc_train.run.attempts.claim_attempt", _full)
    monkeypatch.setattr("hpc_train.launchers.slurm.begin.write_status", _full)
    with pytest.raises(StorageError, match="the disk is full"):
        batch.begin(restart=1)
    (message,) = receiver.messages
    assert message["event"] == "failed" and "the disk is full" in message["reason"]


@pytest.mark.parametrize("failure", ["hangs", "refuses", "redirects", "is not there"])
def test_a_failing_server_delays_little_and_changes_nothing(
    batch: Batch, receiver: Receiver, capfd: pytest.CaptureFixture[str], failure: str
) -> None:
    url = "http://127.0.0.1:9/" + SECRET if failure == "is not there" else receiver.url
    receiver.hangs = failure == "hangs"
    receiver.status = {"refuses": 500, "redirects": 302}.get(failure, 200)
    limit_s = 0.3 if failure == "hangs" else 30
    configure(f"webhook: {url}\nevents: [failed]\ntimeout_s: {limit_s}\n")
    batch.rank(1, 77, "NonFiniteError: too hot\n")
    assert batch.after(77).startswith("stop "), "else it would wait for the answer for ever"
    assert read_status(batch.paths).state == "failed"
    told = [line for line in capfd.readouterr().err.splitlines() if "notification" in line]
    words = {"hangs": "did not answer within 0.3 s", "refuses": "HTTP status 500", "redirects": "status 302"}
    assert len(told) == 1 and words.get(failure, "refused") in told[0] and SECRET not in told[0]
    expected = int(failure != "is not there")
    assert came_true(lambda: len(receiver.messages) == expected, LIMIT_S)


def test_a_requeue_waits_less_for_a_server_than_the_settings_allow(
    batch: Batch, receiver: Receiver, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.hangs = True
    configure(f"webhook: {receiver.url}\nevents: [requeued]\ntimeout_s: 30\n")
    monkeypatch.setattr(notifications, "_REQUEUED_LIMIT_S", 0.2)
    monkeypatch.setattr(notifications, "_WHOLE_REQUEUED_LIMIT_S", LIMIT_S)
    stop(batch, "SIGTERM", 1)
    assert "did not answer within 0.2 s" in capfd.readouterr().err


def test_a_home_folder_that_hangs_or_a_damaged_environment_changes_nothing(
    batch: Batch, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(notifications, "read_webhook", lambda file: released.wait(HANG_LIMIT_S))
    monkeypatch.setattr(notifications, "_WHOLE_REQUEUED_LIMIT_S", 0.2)
    stop(batch, "SIGTERM", 1)
    assert "notification not sent: not done within 0.2 s" in capfd.readouterr().err
    released.set()
    monkeypatch.setattr(notifications, "_WHOLE_REQUEUED_LIMIT_S", LIMIT_S)
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert batch.after(75) == "requeue 75"
    assert "notification not sent: ModuleNotFoundError" in capfd.readouterr().err


@dataclass
class _Plugin:
    """Launches an attempt that ends as it is told."""

    state: str

    def launch(self, request: LaunchRequest, poll: Any) -> ExitCode:
        status = read_status(request.paths)
        write_status(request.paths, RunStatus(self.state, 10, 10, attempt=status.attempt))
        return ExitCode.DONE if self.state == "completed" else ExitCode.FAILED


def test_a_run_of_this_machine_that_has_filled_its_disk_reports_that(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plugin:
        def launch(self, request: LaunchRequest, poll: Any) -> ExitCode:
            monkeypatch.setattr("hpc_train.launchers.following.write_status", _full)
            return ExitCode.IO

    configure(f"webhook: {receiver.url}\n")
    paths = small_run(tmp_path)
    FollowingLauncher("local", Plugin()).start(paths.siblings, [StartRequest(paths, small_experiment())])
    (message,) = receiver.messages
    assert (message["event"], message["reason"]) == ("failed", "launcher local: exit code 74")


@pytest.mark.parametrize("state", ["completed", "failed"])
def test_a_local_run_reports_its_end(tmp_path: Path, receiver: Receiver, unhurried: str, state: str) -> None:
    configure(f"webhook: {receiver.url}\n{unhurried}")
    paths = small_run(tmp_path)
    launcher = FollowingLauncher("local", _Plugin(state))  # type: ignore[arg-type]
    launcher.start(paths.siblings, [StartRequest(paths, small_experiment())])
    (message,) = receiver.messages
    assert message["text"] == f"small/abc {state} at step 10 of 10" and message["experiment"] == "small"


def test_the_settings_are_checked_without_being_shown(tmp_path: Path) -> None:
    assert read_webhook(settings_file()) is None
    address = f"webhook: https://hooks.example.org/{SECRET}\n"
    for text, mode, told in (
        (address, 0o644, "others can read it (mode 0644); type chmod 600"),
        ("webhook: ftp://" + SECRET, 0o600, "webhook must be an address like"),
        (f"webhok: https://{SECRET}", 0o600, "has an unknown key; its keys are webhook"),
        (address + "events: [started]", 0o600, "events must be a list of some of completed, failed"),
        (address + "timeout_s: 900", 0o600, "timeout_s must be a number of seconds up to 30"),
        (SECRET, 0o600, "is not a YAML mapping"),
    ):
        path = configure(text, mode)
        with pytest.raises(BadFileError) as error:
            read_webhook(path)
        assert told in str(error.value) and SECRET not in str(error.value)
    found = read_webhook(configure(address))
    assert found is not None and SECRET not in repr(found) and found.events == {"completed", "failed"}
    said: list[str] = []
    configure(address, 0o640)
    notify_end(RunPaths(tmp_path), said.append)
    assert len(said) == 1 and "others can read it" in said[0]
    assert [each.level for each in _webhook()] == ["warning"]
    configure(address)
    assert [each.what for each in _webhook()] == [
        "notifications: to hooks.example.org; hpc-train notify sends a test message"
    ]


def test_a_test_message_is_sent(receiver: Receiver) -> None:
    done = hpc_train("notify")
    assert done.code == 2 and "write the line webhook: https://… to it" in done.err
    configure(f"webhook: {receiver.url}\n")
    done = hpc_train("notify")
    assert done.code == 0 and done.out == "sent to 127.0.0.1; runs report there: completed, failed\n"
    assert "test message of hpc-train" in receiver.messages[0]["text"]
    receiver.status = 404
    done = hpc_train("notify")
    assert done.code == 74 and "not sent: 127.0.0.1: HTTP status 404" in done.err
