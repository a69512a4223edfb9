"""Whatever a tracking server does, training is not delayed, ``sync`` sends the rest, and no secret leaks."""

from __future__ import annotations

import os
import random
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from hpc_train.experiment.config.schema import Experiment
from hpc_train.loggers import process_logger
from hpc_train.loggers.base import LoggerContext
from hpc_train.loggers.process_logger import MlflowLogger, WandbLogger
from hpc_train.loggers.wandb import _named
from hpc_train.paths import RunPaths, runs_root
from hpc_train.run import frozen_experiment
from hpc_train.run.metric_rows import iter_rows
from tests.cli.commands import succeeded
from tests.loggers.attempts import Attempt
from tests.loggers.mlflow_server import MlflowServer
from tests.loggers.test_mlflow import expected
from tests.loggers.test_secrets import MARKER, leaks
from tests.loggers.test_sync import saved, wandb_id
from tests.loggers.tracking_server import Fault, Handler, TrackingServer, serving
from tests.loggers.wandb_files import plain
from tests.loggers.wandb_server import WandbServer
from tests.run.runs import small_run
from tests.waiting import HANG_LIMIT_S, came_true

_PAGE = b"<html>Please log in</html>"
_PORTAL = "captive portal"
_LACKS = re.compile(r"(wandb|mlflow): the server has (at least )?(\d+) of (\d+) rows")
#: Ends what faults wait for, at the end of a test.
_released = threading.Event()


def status(code: int, content: bytes = b"no", *, every: int = 1, **headers: str) -> Fault:
    """Answer each request, or one in ``every``, by an HTTP status."""
    count = [0]

    def act(handler: Handler) -> bool:
        count[0] += 1
        if count[0] % every != 1 % every:
            return False
        handler.reply(content, code, {name.replace("_", "-"): value for name, value in headers.items()})
        return True

    return act


def hang(handler: Handler) -> bool:
    _released.wait(HANG_LIMIT_S)
    handler.close_connection = True
    return True


def slow(handler: Handler) -> bool:
    _released.wait(0.2)
    return False


def truncated(handler: Handler) -> bool:
    """Do what is requested, and end within the answer."""
    handler.work()
    handler.reply(b'{"da', length=100)
    handler.close_connection = True
    return True


def malformed(handler: Handler) -> bool:
    handler.work()
    handler.reply(b'{"data": {]')
    return True


def reset(handler: Handler) -> bool:
    """Do what is requested, and reset the connection within the answer."""
    handler.work()
    handler.reply(b'{"da', length=100)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True
    return True


def endless(handler: Handler) -> bool:
    handler.reply(b"{", length=1 << 40)
    while not _released.wait(0.01):
        handler.wfile.write(b" " * 4096)
    return True


@dataclass(frozen=True)
class Kind:
    """A kind of misbehavior; ``fault`` is of ``rows``' requests only, or of all."""

    name: str
    fault: Fault | None = None
    rows_only: bool = False
    #: The server refuses connections: at the start, or once it has rows.
    is_away: bool = False
    comes_late: bool = False
    #: It first has rows.
    dies: bool = False
    scheme: str = "http"
    #: Where requests are redirected to is a server of another host.
    redirect_status: int = 0
    #: What the warning names, if the client says it within the limit.
    reasons: tuple[tuple[str, str], ...] = ()
    #: Trackers that each run of the tests tries it with.
    always: tuple[str, ...] = ()


def refuses(code: int, words: str, always: tuple[str, ...] = ()) -> Kind:
    reasons = (("wandb", f"{code} {words}"), ("mlflow", str(code)))
    return Kind(str(code), status(code), rows_only=True, reasons=reasons, always=always)


KINDS = (
    Kind("away at the start", is_away=True, comes_late=True),
    Kind(
        "captive portal at the start",
        status(200, _PAGE, Content_Type="text/html"),
        comes_late=True,
        always=("wandb",),
    ),
    Kind("away until sync", is_away=True, always=("wandb", "mlflow")),
    Kind("dies", is_away=True, dies=True),
    Kind("never answers", hang, always=("mlflow",)),
    Kind("never answers rows", hang, rows_only=True, dies=True),
    Kind("slow", slow),
    Kind("500 now and then", status(500, every=2)),
    Kind("503 for rows", status(503), rows_only=True),
    refuses(401, "Unauthorized"),
    refuses(403, "Forbidden", always=("wandb",)),
    refuses(404, "Not Found"),
    Kind("410", status(410), rows_only=True),
    refuses(413, "Request Entity Too Large"),
    Kind(
        "captive portal",
        status(200, _PAGE, Content_Type="text/html"),
        rows_only=True,
        dies=True,
        reasons=(("wandb", _PORTAL), ("mlflow", "Please log in")),
        always=("wandb",),
    ),
    Kind("empty answers", status(200, b""), comes_late=True),
    Kind("429", status(429, Retry_After="3600"), rows_only=True),
    Kind("truncated answers", truncated, rows_only=True),
    Kind("malformed answers", malformed, rows_only=True),
    Kind("connection resets", reset, rows_only=True),
    Kind("redirects", redirect_status=302),
    Kind("redirects rows", rows_only=True, redirect_status=307, always=("wandb", "mlflow")),
    Kind("no TLS", scheme="https"),
    Kind("endless answers", endless),
)


def sample() -> list[tuple[str, Kind]]:
    """Return (tracker, kind): all pairs if HPC_TRAIN_ALL_PARALLEL is set, else less than half of them."""
    pairs = [(tracker, kind) for kind in KINDS for tracker in ("wandb", "mlflow")]
    if os.environ.get("HPC_TRAIN_ALL_PARALLEL"):
        return pairs
    always = [(tracker, kind) for tracker, kind in pairs if tracker in kind.always]
    others = [(tracker, kind) for tracker, kind in pairs if not kind.always]
    by_tracker = ([pair for pair in others if pair[0] == tracker] for tracker in ("wandb", "mlflow"))
    draw = random.Random(3)
    return always + [
        pair for count, some in zip((1, 0), by_tracker, strict=True) for pair in draw.sample(some, count)
    ]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_API_KEY", MARKER * 4)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", f"{MARKER}-token")
    _released.clear()
    yield
    _released.set()


@pytest.fixture
def run() -> RunPaths:
    logging = {"wandb": {"project": "p", "mode": "online"}, "mlflow": {}}
    return small_run(runs_root(), logging=logging)


def logger_of(tracker: str, run: RunPaths) -> Callable[[int], process_logger.ProcessLogger]:
    experiment: Experiment = frozen_experiment.read(run)
    logger = WandbLogger if tracker == "wandb" else MlflowLogger
    return lambda number: logger(LoggerContext(experiment, run, "abc", number, wandb_id(run), {}))


def has_exactly(server: TrackingServer, run: RunPaths) -> bool:
    """Return True if the server has the rows of ``metrics.jsonl``, each once and complete."""
    if isinstance(server, WandbServer):
        rows = [plain(served.history) for served in server.runs.values()]
        return rows == [[_named(each) for each in iter_rows(run.metrics)]]
    assert isinstance(server, MlflowServer)
    return [served.history for served in server.runs.values()] == [expected(run)]


def num_rows_at(server: TrackingServer) -> int:
    if isinstance(server, WandbServer):
        return sum(len(served.history) for served in server.runs.values())
    assert isinstance(server, MlflowServer)
    return sum(len(points) for served in server.runs.values() for points in served.history.values())


def wait_until(attempt: Attempt, is_so: Callable[[], object]) -> None:
    assert came_true(lambda: attempt.has_ended or is_so(), HANG_LIMIT_S) and not attempt.has_ended


@pytest.mark.slow
@pytest.mark.parametrize(("tracker", "kind"), [pytest.param(*c, id=f"{c[1].name}-{c[0]}") for c in sample()])
def test_rows_are_complete_and_once_after_sync(
    run: RunPaths,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tracker: str,
    kind: Kind,
) -> None:
    outputs: list[str] = []

    def told() -> str:
        outputs.extend(capfd.readouterr())
        return "".join(outputs)

    with ExitStack() as stack:
        server = stack.enter_context(serving(WandbServer() if tracker == "wandb" else MlflowServer()))
        elsewhere = stack.enter_context(serving(TrackingServer()))
        _set_address(monkeypatch, server.url.replace("http:", f"{kind.scheme}:"))
        reason = dict(kind.reasons).get(tracker, "")
        limit_s = HANG_LIMIT_S if reason or kind.comes_late else 1.0
        monkeypatch.setattr(process_logger, "_CLOSE_LIMIT_S", limit_s)
        monkeypatch.setattr(process_logger, "_REPORT_LIMIT_S", HANG_LIMIT_S)
        if kind.comes_late and not kind.is_away:
            monkeypatch.delenv("WANDB_INIT_TIMEOUT")

        if not kind.dies:
            _misbehave(server, kind, elsewhere)
        attempt = Attempt(run, 1, 0, logger_of(tracker, run))
        attempt.train(1, 2, saved=2)
        if kind.dies:
            wait_until(attempt, lambda: num_rows_at(server) >= 2)
            _misbehave(server, kind, elsewhere)
        if kind.comes_late or (kind.is_away and not kind.dies):
            wait_until(attempt, lambda: "; the run continues" in told())
        if kind.comes_late:
            _behave(server)
        attempt.train(3, 4, saved=4)
        if not kind.is_away and not kind.comes_late:
            wait_until(attempt, lambda: server.num_faults)
        saved(run, 4, 1, "completed")
        attempt.end("completed")

        lines = [line for line in told().splitlines() if "hpc-train sync abc" in line]
        num_there, has_all = num_rows_at(server), has_exactly(server, run)
        assert len(lines) <= 1 and (lines or has_all)
        assert has_all or not (kind.comes_late and not kind.is_away), "it was tried again at the checkpoint"
        for line in lines:
            named = _LACKS.match(line)
            assert named is not None and named[4] == "6" and int(named[3]) <= num_there, line
            assert reason in line
        assert "is abandoned" not in caplog.text

        _behave(server)
        _set_address(monkeypatch, server.url)
        done = succeeded("sync", "abc", "--to", tracker)
        assert has_exactly(server, run)
        if isinstance(server, MlflowServer):
            (served,) = server.runs.values()
            assert served.info["status"] == "FINISHED"
        assert leaks(runs_root(), (*outputs, done.out, done.err)) == []
        assert not any(secret in each for each in elsewhere.received for secret in _secrets_in_requests())


def _set_address(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", url)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url.replace("://", f"://someone:{MARKER}-password@"))


def _secrets_in_requests() -> list[str]:
    return [MARKER, "Authorization"]


def _misbehave(server: TrackingServer, kind: Kind, elsewhere: TrackingServer) -> None:
    if kind.is_away:
        server.end()
        return
    fault = kind.fault
    if kind.redirect_status:
        url = elsewhere.url.replace("127.0.0.1", "localhost")
        fault = lambda handler: status(kind.redirect_status, Location=url + handler.path)(handler)  # noqa: E731
    if fault is not None:

        def act(handler: Handler) -> bool:
            if kind.rows_only and not handler.is_rows:
                return False
            server.num_faults += 1
            return fault(handler)

        server.fault = act


def _behave(server: TrackingServer) -> None:
    _released.set()
    server.fault = None
    if server.is_away:
        server.begin()
