"""``notify``: a test message to the webhook that runs report to."""

from __future__ import annotations

import socket

from hpc_train.console import put, say
from hpc_train.errors import ExitCode, UsageError
from hpc_train.launchers.notifications import NotSentError, post, read_webhook, settings_file, text_of


def notify() -> ExitCode:
    """Post a test message. IO if it can't be sent; raises UsageError without a webhook, BadFileError."""
    path = settings_file()
    webhook = read_webhook(path)
    if webhook is None:
        raise UsageError(f"{path}: there is no such file; write the line webhook: https://… to it, mode 600")
    message = text_of(f"test message of hpc-train on {socket.gethostname()}") | {"event": "test"}
    try:
        post(webhook, message)
    except NotSentError as error:
        say(f"not sent: {error}")
        return ExitCode.IO
    events = ", ".join(sorted(webhook.events)) or "nothing"
    put(f"sent to {webhook.host}; runs report there: {events}")
    return ExitCode.DONE
