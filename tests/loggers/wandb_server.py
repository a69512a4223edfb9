"""A fake of wandb's server: keeps runs as the real one does, lines of history by their offset."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.loggers.tracking_server import TrackingServer

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


class WandbServer(TrackingServer):
    """The runs by their ids; ``url`` and a key are what a client needs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[str, ServedRun] = {}
        #: Projects in which runs were begun.
        self.projects: set[str] = set()

    def is_rows(self, path: str, body: dict[str, Any]) -> bool:
        return path.endswith("/file_stream")

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
