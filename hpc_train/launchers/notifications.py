"""Posts the end of an attempt to the user's webhook; called after the diagnosis.

A failure is one line in the log: it changes neither an exit code nor a requeue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hpc_train.errors import BadFileError
from hpc_train.paths import RunPaths
from hpc_train.run.run_facts import run_facts
from hpc_train.run.run_status import RunStatus, read_status

#: Slurm ends a preempted job within seconds, and it is requeued only after this.
_REQUEUED_LIMIT_S = 2.0
#: Limits of all: the settings are in a home folder that may hang, the modules on a disk that may.
_WHOLE_LIMIT_S = 60.0
_WHOLE_REQUEUED_LIMIT_S = 4.0
_MAX_REASON = 500


def notify_end(paths: RunPaths, say: Callable[[str], None], status: RunStatus | None = None) -> None:
    """Post the state of the run if the user subscribed to it; ``say`` prints a line to the log.

    ``status``: how the run ended, since a full disk may lack it; None: read it.
    """
    problems: list[str] = []
    try:
        status = status or read_status(paths)
        is_requeued = status.state == "requeued"
        limit_s = _WHOLE_REQUEUED_LIMIT_S if is_requeued else _WHOLE_LIMIT_S
        thread = threading.Thread(target=_notify, args=(paths, status, problems), daemon=True)
        thread.start()
        thread.join(limit_s)
        if thread.is_alive():
            problems.append(f"not done within {limit_s:g} s")
    except Exception as error:  # nothing here may affect the run
        problems.append(type(error).__name__)
    for problem in problems[:1]:
        say(f"notification not sent: {problem}")


def _notify(paths: RunPaths, status: RunStatus, problems: list[str]) -> None:
    """Post it; add why that was impossible to ``problems``."""
    try:
        from hpc_train.launchers.webhook import NotSentError, post, read_webhook, settings_file  # urllib
    except Exception as error:  # a damaged environment
        problems.append(type(error).__name__)
        return
    try:
        webhook = read_webhook(settings_file())
        if webhook is not None and status.state in webhook.events:
            limit_s = _REQUEUED_LIMIT_S if status.state == "requeued" else None
            post(webhook, message_of(paths, status), limit_s)
    except (BadFileError, NotSentError) as error:
        problems.append(str(error))
    except Exception as error:  # the text may contain the address
        problems.append(type(error).__name__)


def message_of(paths: RunPaths, status: RunStatus) -> dict[str, Any]:
    """Return the message: ``text`` for Slack and Mattermost, ``content`` for Discord, and the facts."""
    run, experiment = paths.folder.name, str(run_facts(paths).get("name") or paths.folder.parent.name)
    reason = None if status.reason is None else status.reason[:_MAX_REASON]
    steps = f"step {status.step:,}" + (f" of {status.total_steps:,}" if status.total_steps else "")
    text = f"{experiment}/{run} {status.state} at {steps}" + (f": {reason}" if reason else "")
    return text_of(text) | {
        "event": status.state,
        "run": run,
        "experiment": experiment,
        "state": status.state,
        "step": status.step,
        "total_steps": status.total_steps,
        "attempt": status.attempt,
        "reason": reason,
    }


def text_of(text: str) -> dict[str, Any]:
    """Return the visible part of a message; text of a log in it can't mention users or create links."""
    plain = text.replace("@", "@\u200b")  # @channel, @everyone
    escaped = plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {"text": escaped, "content": plain, "allowed_mentions": {"parse": []}}
