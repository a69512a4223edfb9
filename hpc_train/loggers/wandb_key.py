"""Which server wandb sends to, and whether this user has an API key for it.

Also called by ``submit``, so wandb, which takes a second to import, is not: a test compares with what
``wandb login`` of the installed version writes.
"""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

#: Two addresses of wandb's own server: the default, and that of older versions. A key in netrc for the old
#: one is also used for the new one, but not the other way round.
_DEFAULT, _BEFORE = "api.forge.coreweave.com", "api.wandb.ai"
#: Its web site, which serves the same API below a path.
_SITE = "forge.coreweave.com"


def has_key() -> bool:
    """Tell whether an API key is set for the server, in any of the places where wandb looks."""
    if os.environ.get("WANDB_API_KEY") or _settings().get("api_key"):
        return True
    try:
        known = netrc.netrc(str(_netrc_file()))
    except (OSError, ValueError, netrc.NetrcParseError):
        return False
    found = (known.authenticators(machine) for machine in _machines(base_url() or ""))
    return any(entry is not None and entry[2] for entry in found)


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


def _netrc_file() -> Path:
    """Return the file that wandb reads. Unlike the default of the netrc module it may be readable to all."""
    if given := os.environ.get("NETRC"):
        return Path(given).expanduser()
    own = Path("~/.netrc").expanduser()
    other = Path("~/_netrc").expanduser()
    return other if other.exists() and not own.exists() else own


def _settings() -> dict[str, str]:
    """Return wandb's settings of this user, which ``wandb login --host`` writes; empty if unreadable."""
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    parser = configparser.ConfigParser()
    try:
        parser.read(folder / "settings")
        return dict(parser.items("default"))
    except (OSError, ValueError, configparser.Error):
        return {}


def effective_mode(mode: str) -> str:
    """Return ``logging.wandb.mode``, or the mode that ``auto`` selects: ``online`` if there is a key."""
    if mode != "auto":
        return mode
    return "online" if has_key() else "offline"
