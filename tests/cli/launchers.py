"""Launchers that end at once: commands are tested without ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from hpc_train.errors import ExitCode
from hpc_train.launchers.base import LaunchRequest
from hpc_train.run_folder.attempts import read_record, write_record
from hpc_train.run_folder.status import RunStatus, write_status

COMPLETING = "tests.cli.launchers:Completing"
FAILING = "tests.cli.launchers:Failing"
INTERRUPTED = "tests.cli.launchers:Interrupted"

#: What was asked for, newest last; tests clear it.
requests: list[LaunchRequest] = []


class Completing:
    """The run does all its steps."""

    name, state, reason, exit_code = COMPLETING, "completed", None, ExitCode.DONE

    def launch(self, request: LaunchRequest, poll: Callable[[], None]) -> ExitCode:
        requests.append(request)
        status = RunStatus(state="running", step=5, total_steps=9, attempt=request.attempt)
        write_status(request.paths, status)
        row = {"attempt": request.attempt, "split": "val", "step": 5, "loss": 0.5, "accuracy": 0.75}
        with request.paths.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")
        poll()
        attempt = request.paths.attempt(request.attempt)
        record = read_record(attempt)
        assert record is not None
        record = replace(record, launcher=self.name, devices=request.devices)
        write_record(attempt, record.ended([int(self.exit_code)], self.reason))
        write_status(request.paths, replace(status, state=self.state, reason=self.reason))
        return self.exit_code


class Failing(Completing):
    """The run breaks."""

    name, state, reason, exit_code = FAILING, "failed", "rank 0: it broke", ExitCode.FAILED


class Interrupted(Completing):
    """Somebody presses Ctrl-C."""

    name, state, reason, exit_code = INTERRUPTED, "failed", "interrupted", ExitCode.INTERRUPTED
