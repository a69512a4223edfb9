"""A fake of MLflow's server: experiments, runs, and their metrics in the order of their arrival."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.loggers.tracking_server import TrackingServer


@dataclass
class MlflowRun:
    """What the server has of one run."""

    info: dict[str, Any]
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    #: Metric → (step, value, time in milliseconds).
    history: dict[str, list[tuple[int, float, int]]] = field(default_factory=dict)

    def shown(self) -> dict[str, Any]:
        pairs = {
            kind: [{"key": key, "value": value} for key, value in values.items()]
            for kind, values in (("tags", self.tags), ("params", self.params))
        }
        return {"info": self.info, "data": pairs}


class MlflowServer(TrackingServer):
    """The runs by their ids, of experiments by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, MlflowRun] = {}

    def is_rows(self, path: str, body: dict[str, Any]) -> bool:
        return path.endswith("/runs/log-batch") and bool(body.get("metrics"))

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        parts = urlsplit(path)
        given = {name: values[0] for name, values in parse_qs(parts.query).items()} | body
        operation = "_".join(parts.path.split("/")[-2:]).replace("-", "_")
        work = getattr(self, f"_{operation}", None)
        answer: dict[str, Any] | None = None if work is None else work(given)
        return answer

    def _experiments_get_by_name(self, given: dict[str, Any]) -> dict[str, Any] | None:
        name = given["experiment_name"]
        if name not in self.experiments:
            return None
        shown = {"experiment_id": self.experiments[name], "name": name, "lifecycle_stage": "active"}
        return {"experiment": shown}

    def _experiments_create(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"experiment_id": self.experiments.setdefault(given["name"], str(len(self.experiments) + 1))}

    def _runs_search(self, given: dict[str, Any]) -> dict[str, Any]:
        tag = given["filter"].split("'")[1]
        return {"runs": [run.shown() for run in self.runs.values() if tag in run.tags.values()]}

    def _runs_create(self, given: dict[str, Any]) -> dict[str, Any]:
        info = {
            "run_id": f"{len(self.runs) + 1:032x}",
            "experiment_id": given["experiment_id"],
            "run_name": given["run_name"],
            "status": "RUNNING",
            "lifecycle_stage": "active",
        }
        run = MlflowRun(info, {tag["key"]: tag["value"] for tag in given.get("tags", ())})
        self.runs[info["run_id"]] = run
        return {"run": run.shown()}

    def _runs_get(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"run": self.runs[given["run_id"]].shown()}

    def _runs_update(self, given: dict[str, Any]) -> dict[str, Any]:
        run = self.runs[given["run_id"]]
        run.info |= {"status": given["status"]}
        return {"run_info": run.info}

    def _runs_log_batch(self, given: dict[str, Any]) -> dict[str, Any]:
        run = self.runs[given["run_id"]]
        run.params |= {param["key"]: param["value"] for param in given.get("params", ())}
        for each in given.get("metrics", ()):
            point = int(each["step"]), float(each["value"]), int(each["timestamp"])
            run.history.setdefault(each["key"], []).append(point)
        return {}

    def _metrics_get_history(self, given: dict[str, Any]) -> dict[str, Any]:
        key = given["metric_key"]
        points = self.runs[given["run_id"]].history.get(key, ())
        return {
            "metrics": [
                {"key": key, "step": step, "value": value, "timestamp": time} for step, value, time in points
            ]
        }
