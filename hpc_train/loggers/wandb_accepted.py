"""How many of a run's rows wandb's server has.

Its client reports a row as sent once it is queued: a server that accepts the run and refuses its rows is only
named in the client's log.
"""

from __future__ import annotations

import base64
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_train.loggers.wandb_key import api_key, base_url
from hpc_train.redaction import without_credentials
from hpc_train.run.redirects import NoRedirects

#: How long to wait for the server's answer: the run is about to end.
_TIMEOUT_S = 3.0
#: By which wandb itself asks at a resume where to continue.
_QUERY = """query RunResumeStatus($project: String, $entity: String, $name: String!) {
  model(name: $project, entityName: $entity) { bucket(name: $name, missingOk: true) { historyLineCount } }
}"""
_FAILED = re.compile(r"filestream: (?:fatal error|json decode error)[^\n]*")
_STATUS = re.compile(r"\b([45]\d\d [A-Z][A-Za-z -]*?)(?= url=|:|$)")


def num_accepted(run: Any) -> int | None:
    """Return the number of rows of a run that the server has; None if it does not say."""
    import wandb

    url = without_credentials(base_url() or str(wandb.Settings().base_url)).rstrip("/")
    if (key := api_key()) is None:
        return None
    variables = {"project": run.project, "entity": run.entity, "name": run.id}
    request = urllib.request.Request(
        f"{url}/graphql",
        json.dumps({"operationName": "RunResumeStatus", "query": _QUERY, "variables": variables}).encode(),
        {
            "Authorization": "Basic " + base64.b64encode(f"api:{key}".encode()).decode(),
            "Content-Type": "application/json",
        },
    )
    try:
        with urllib.request.build_opener(NoRedirects).open(request, timeout=_TIMEOUT_S) as answer:
            count = json.load(answer)["data"]["model"]["bucket"]["historyLineCount"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return count if type(count) is int else None


def refusal(logs: Path) -> str | None:
    """Return why rows were refused, according to the client's logs in this folder; None if none were."""
    failures = [failure for log in sorted(logs.glob("*.log")) for failure in _failures(log)]
    if not failures:
        return None
    status = _STATUS.search(failures[-1])
    return status[1] if status else "its answer is not JSON, as from a captive portal or a proxy"


def _failures(log: Path) -> Iterator[str]:
    try:
        yield from _FAILED.findall(log.read_text(errors="replace"))
    except OSError:
        return
