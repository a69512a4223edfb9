"""Tells a user's webhook how an attempt of a run has ended; called by whoever has judged that.

A failure is one line in the log: it changes neither an exit code nor a requeue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpc_train.errors import BadFileError
from hpc_train.paths import RunPaths
from hpc_train.run.run_facts import run_facts
from hpc_train.run.run_status import RunStatus, read_status

#: Slurm ends a preempted job within seconds, and it is requeued only after this.
_REQUEUED_LIMIT_S = 2.0
_MAX_REASON = 500


def notify_end(paths: RunPaths, say: Callable[[str], None]) -> None:
    """Post the state of the run, if the user wants to know of it; ``say`` prints a line to the log."""
    from hpc_train.launchers.webhook import NotSentError, post, read_webhook, settings_file  # urllib

    try:
        webhook = read_webhook(settings_file())
        status = read_status(paths)
        if webhook is None or status.state not in webhook.events:
            return
        post(webhook, message_of(paths, status), _REQUEUED_LIMIT_S if status.state == "requeued" else None)
    except (BadFileError, NotSentError) as error:
        say(f"notification not sent: {error}")
    except Exception as error:  # nothing here may affect the run; the text may contain the address
        say(f"notification not sent: {type(error).__name__}")


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
    """Return the part of a message that people see; words of a log in it notify nobody and link nothing."""
    plain = text.replace("@", "@\u200b")  # @channel, @everyone
    escaped = plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {"text": escaped, "content": plain, "allowed_mentions": {"parse": []}}
