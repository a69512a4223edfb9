"""The server of wandb, and the user's API key for it.

Also called by ``submit``, so wandb, which takes a second to import, is not imported; a test compares with
the files that the installed ``wandb login`` writes.
"""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Iterator
from urllib.parse import urlsplit

from hpc_train.paths import expanded
from hpc_train.redaction import netrc_file

#: Two addresses of wandb's own server: the default, and that of older versions. A key in netrc for the old
#: one is also used for the new one, but not the other way round.
_DEFAULT, _BEFORE = "api.forge.coreweave.com", "api.wandb.ai"
#: Its web site, which serves the same API below a path.
_SITE = "forge.coreweave.com"
#: Values of ``WANDB_MODE``, including the values of older versions → the mode.
_MODES = {
    "online": "online",
    "run": "online",
    "shared": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}
_TRUE = {"1", "true", "yes", "on", "y", "t"}


def has_key() -> bool:
    """Return True if an API key is set for the server, in any of wandb's places."""
    return api_key() is not None


def api_key() -> str | None:
    """Return the API key for the server; None if there is none."""
    if key := os.environ.get("WANDB_API_KEY") or _settings().get("api_key"):
        return key
    try:
        keys = netrc.netrc(str(netrc_file(os.environ)))  # unlike netrc's default, it may be readable to all
    except (OSError, ValueError, netrc.NetrcParseError):
        return None
    entries = (keys.authenticators(machine) for machine in _machines(base_url() or ""))
    return next((entry[2] for entry in entries if entry is not None and entry[2]), None)


def base_url() -> str | None:
    """Return the address of the server that the user has chosen; None: wandb's default."""
    return os.environ.get("WANDB_BASE_URL") or _settings().get("base_url") or None


def _machines(url: str) -> Iterator[str]:
    """Yield the names that the server's key may have in netrc."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return
    if not parts.netloc or parts.hostname in {_DEFAULT, _SITE}:
        yield from (_DEFAULT, _BEFORE)
        return
    yield parts.netloc
    if parts.hostname:  # older versions write no port
        yield parts.hostname


def _settings() -> dict[str, str]:
    """Return wandb's settings of this user, which ``wandb login --host`` writes; empty if unreadable."""
    folder = expanded(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb")
    parser = configparser.ConfigParser()
    try:
        parser.read(folder / "settings")
        return dict(parser.items("default"))
    except (OSError, ValueError, configparser.Error):
        return {}


def effective_mode(mode: str) -> str:
    """Return ``logging.wandb.mode``, or for ``auto`` the mode that the environment selects.

    ``disabled`` if the environment turns wandb off, and ``online`` if there is a key.
    """
    if mode != "auto":
        return mode
    return _mode_of_environment() or ("online" if has_key() else "offline")


def needs_key(mode: str) -> bool:
    """Return True if rows of this ``logging.wandb.mode`` go to the server once there is a key."""
    return (mode if mode != "auto" else _mode_of_environment()) not in ("offline", "disabled")


def invalid_mode() -> str | None:
    """Return the value of ``WANDB_MODE`` if it is not a mode; it is then ignored."""
    mode = os.environ.get("WANDB_MODE", "")
    return mode if mode and mode.lower() not in _MODES else None


def _mode_of_environment() -> str | None:
    if os.environ.get("WANDB_DISABLED", "").lower() in _TRUE:
        return "disabled"
    return _MODES.get(os.environ.get("WANDB_MODE", "").lower())
