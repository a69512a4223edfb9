"""``verify --replay --submit``: the request that the jobs of an array read, and what each has recorded.

Files in the folder ``verification`` of the run. Names of records contain the token of their request, so that
a late job of an earlier request is ignored.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass
from typing import Any

from hpc_train.paths import RunPaths
from hpc_train.run.file_shapes import decoded
from hpc_train.run.files import read_json, write_json


@dataclass(frozen=True)
class PartsRequest:
    """The jobs' request: how the run's stretches are repeated, and in how many parts."""

    token: str
    parts: int
    #: The newest step of the run at that time.
    last: int
    devices: int | None
    tolerance: float | None
    code: str | None
    #: The array's id; None until it is submitted.
    job: str | None = None

    @classmethod
    def new(
        cls, parts: int, last: int, devices: int | None, tolerance: float | None, code: str | None
    ) -> PartsRequest:
        """Return a request with a token of its own."""
        return cls(secrets.token_hex(4), parts, last, devices, tolerance, code)

    @classmethod
    def read(cls, paths: RunPaths) -> PartsRequest | None:
        """Return the newest request; None without one."""
        return decoded(cls, read_json(paths.verification / "request.json"))

    def write(self, paths: RunPaths) -> None:
        """Replace the run's request."""
        paths.verification.mkdir(exist_ok=True)
        write_json(paths.verification / "request.json", asdict(self), sync=True)

    def note(self, paths: RunPaths, part: int, record: dict[str, Any]) -> None:
        """Record the result of a part."""
        write_json(paths.verification / self._name(part), record, sync=True)

    def records(self, paths: RunPaths) -> dict[int, dict[str, Any]]:
        """Return part → its record, of those that have ended."""
        parts = range(1, self.parts + 1)
        read = {part: read_json(paths.verification / self._name(part)) for part in parts}
        return {part: record for part, record in read.items() if record is not None}

    def _name(self, part: int) -> str:
        return f"{self.token}-part-{part}.json"
