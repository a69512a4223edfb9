"""Whether wandb's server would let this user in; asked by ``submit`` too, so wandb itself is not imported."""

from __future__ import annotations

import netrc
import os
from contextlib import suppress
from urllib.parse import urlparse


def has_key() -> bool:
    """Tell whether an API key is set for the server: in the environment or in netrc, as wandb looks."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname or "api.wandb.ai"
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False
