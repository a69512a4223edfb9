"""A fake tracking server on a loopback port, which may misbehave."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, TypeVar


class Handler(BaseHTTPRequestHandler):
    """A request: ``body`` is its JSON object, empty if it has none."""

    protocol_version = "HTTP/1.1"
    tracked: TrackingServer
    body: dict[str, Any]
    is_rows: bool

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            data = gzip.decompress(data)
        self.tracked.received.append(f"{self.requestline}\n{self.headers}\n{data.decode(errors='replace')}")
        try:
            self.body = json.loads(data)
        except ValueError:  # without a body, or telemetry, which is not JSON
            self.body = {}
        self.is_rows = self.tracked.is_rows(self.path, self.body)
        if (fault := self.tracked.fault) is None or not fault(self):
            self.reply(*self.work())

    def do_GET(self) -> None:
        self.do_POST()

    def work(self) -> tuple[dict[str, Any], int]:
        """Do what is requested; return the answer and the HTTP status."""
        with self.tracked.lock:
            answer = self.tracked.answer(self.path, self.body)
        if self.is_rows:
            self.tracked.on_lines()
        if answer is None:
            return {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "there is none"}, 404
        return answer, 200

    def reply(
        self,
        answer: Any,
        status: int = 200,
        headers: Mapping[str, str] = MappingProxyType({}),
        *,
        length: int | None = None,
    ) -> None:
        """Send an answer: bytes, or an object as JSON. ``length``: the announced one, if it is not true."""
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | dict(headers)).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)

    def send_error(self, *_: Any, **__: Any) -> None:
        """Answer what is not HTTP, such as a TLS handshake."""
        self.tracked.num_faults += 1
        self.wfile.write(b"junk\r\n\r\n")
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


#: Misbehaves in answer to a request; returns False if the request is to be answered as usual.
Fault = Callable[[Handler], bool]


class TrackingServer:
    """Serves until it is closed; ``url`` is its address."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.fault: Fault | None = None
        self.num_faults = 0
        #: Each request with its headers and its body.
        self.received: list[str] = []
        #: Called after rows were received, before they are confirmed.
        self.on_lines: Callable[[], None] = lambda: None
        self._http: ThreadingHTTPServer | None = None
        self._port = 0
        self._connections: set[socket.socket] = set()
        self.begin()
        self.url = f"http://127.0.0.1:{self._port}"

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer to a request; None for 404."""
        return {}

    def is_rows(self, path: str, body: dict[str, Any]) -> bool:
        """Return True if the request sends rows."""
        return False

    @property
    def is_away(self) -> bool:
        """Whether it refuses connections."""
        return self._http is None

    def begin(self) -> None:
        """Accept connections."""
        connections = self._connections

        class Http(ThreadingHTTPServer):
            daemon_threads = True

            def process_request(self, request: Any, client_address: Any) -> None:
                connections.add(request)
                super().process_request(request, client_address)

            def shutdown_request(self, request: Any) -> None:
                connections.discard(request)
                super().shutdown_request(request)

            def handle_error(self, *_: Any) -> None:
                pass  # a client that was killed

        handler = type("TrackedHandler", (Handler,), {"tracked": self})
        self._http = Http(("127.0.0.1", self._port), handler)
        self._port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def end(self) -> None:
        """Refuse connections, and drop those that exist."""
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None
            for connection in list(self._connections):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


_Server = TypeVar("_Server", bound=TrackingServer)


@contextmanager
def serving(server: _Server) -> Iterator[_Server]:
    """End the server with the block."""
    try:
        yield server
    finally:
        server.end()
