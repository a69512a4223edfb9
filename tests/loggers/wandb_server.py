"""A fake of wandb's server: keeps runs as the real one does, lines of history by their offset."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "tester"


@dataclass
class ServedRun:
    """What the server has of one run."""

    history: list[dict[str, Any]] = field(default_factory=list)
    #: How many lines of history were received: more than there are where some came twice.
    received: int = 0
    summary: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    def write(self, offset: int, lines: list[str]) -> None:
        self.history[offset : offset + len(lines)] = [json.loads(line) for line in lines]
        self.received += len(lines)


@dataclass
class WandbServer:
    """The runs by their ids; ``url`` and a key are what a client needs."""

    url: str = ""
    runs: dict[str, ServedRun] = field(default_factory=dict)
    #: Called after lines of history were received, before they are confirmed.
    on_lines: Callable[[], None] = lambda: None
    #: Whether lines are refused, as where a key has expired.
    refuses_lines: bool = False
    #: Whether lines, or all requests, are answered by a page of HTML, as by a captive portal.
    answers_lines_by_html: bool = False
    is_away: bool = False
    #: Projects in which runs were begun.
    projects: set[str] = field(default_factory=set)

    def environment(self) -> dict[str, str]:
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567"}

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("/file_stream"):
            self._receive(path.split("/")[-2], body.get("files") or {})
            return {}
        variables = body.get("variables") or {}
        operation = body.get("operationName")
        if operation == "RunResumeStatus":
            return {"data": {"model": self._resume_status(variables["name"])}}
        if operation == "UpsertBucket":
            run = self.runs.setdefault(variables["name"], ServedRun())
            run.name = variables.get("displayName") or run.name
            self.projects.add(variables.get("project") or "")
            return {"data": {"upsertBucket": {"bucket": _bucket(variables["name"], run), "inserted": True}}}
        if operation == "CreateRunFiles":
            return {"data": {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": []}}}
        return {"data": {}}

    def _receive(self, run_id: str, files: dict[str, Any]) -> None:
        run = self.runs[run_id]
        if chunk := files.get("wandb-history.jsonl"):
            run.write(chunk["offset"], chunk["content"])
        if chunk := files.get("wandb-summary.json"):
            run.summary = json.loads(chunk["content"][-1])

    def _resume_status(self, run_id: str) -> dict[str, Any] | None:
        run = self.runs.get(run_id)
        return {"id": "1", "name": "p", "entity": _entity(), "bucket": run and _bucket(run_id, run)}


def _entity() -> dict[str, str]:
    return {"id": "1", "name": ENTITY}


def _bucket(run_id: str, run: ServedRun) -> dict[str, Any]:
    tail = [json.dumps(line) for line in run.history[-1:]]
    return {
        "id": run_id,
        "name": run_id,
        "displayName": run.name,
        "description": None,
        "config": "{}",
        "sweepName": None,
        "project": {"id": "1", "name": "p", "entity": _entity()},
        "historyLineCount": len(run.history),
        "historyTail": json.dumps(tail),
        "eventsLineCount": 0,
        "eventsTail": "[]",
        "logLineCount": 0,
        "summaryMetrics": json.dumps(run.summary),
        "tags": [],
        "notes": None,
        "wandbConfig": '{"t": 1}',  # without it the run counts as never started
    }


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """Serve on a loopback port until the block ends."""
    served, lock = WandbServer(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                data = gzip.decompress(data)
            try:
                body = json.loads(data)
            except ValueError:  # telemetry, which is not JSON
                body = {}
            is_stream = self.path.endswith("/file_stream")
            if is_stream and served.refuses_lines:
                self._reply({}, 403)
                return
            if served.is_away or (is_stream and served.answers_lines_by_html):
                self._reply("<html>Please log in</html>")
                return
            with lock:
                answer = served.answer(self.path, body)
            if is_stream:
                served.on_lines()
            self._reply(answer)

        def _reply(self, answer: dict[str, Any] | str, status: int = 200) -> None:
            content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass  # a client that was killed

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
