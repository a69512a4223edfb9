"""The same training as benchmarks/preemption.py's, as submitit's documentation has it: a Checkpointable."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from submitit.helpers import Checkpointable, DelayedSubmission
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.bare_training import net, process_start


class SubmititTraining(Checkpointable):  # type: ignore[misc]
    """Trains without end; saves when submitit asks for it."""

    def __init__(self, folder: Path, step_s: float) -> None:
        self.folder = folder
        self.step_s = step_s

    def __call__(self) -> None:
        self.model: nn.Module = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.step = 0
        if self._file.exists():
            saved = torch.load(self._file, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step = saved["step"]
        self._tell("begin", since=process_start().isoformat(timespec="milliseconds"))
        is_first = True
        while True:
            self._train_step(torch.randn(48, 1, 32, 32), torch.randint(10, (48,)))
            self._tell("step")
            if is_first:
                self._tell("first_step")
                is_first = False

    def _train_step(self, images: Any, labels: Any) -> None:
        time.sleep(self.step_s)
        self.optimizer.zero_grad()
        cross_entropy(self.model(images), labels).backward()
        self.optimizer.step()
        self.step += 1

    def checkpoint(self) -> DelayedSubmission:
        """Called by submitit in its signal handler, on rank 0."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }
        torch.save(state, self._file)
        self._tell("saved")
        return DelayedSubmission(SubmititTraining(self.folder, self.step_s))

    @property
    def _file(self) -> Path:
        return self.folder / "checkpoint.pt"

    def _tell(self, event: str, since: str | None = None) -> None:
        told = {"event": event, "time": since or _now(), "step": self.step}
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(told) + "\n")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
