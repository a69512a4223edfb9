"""Whether this user has an API key for wandb's server; also called by ``submit``, so wandb is not
imported.
"""

from __future__ import annotations

import netrc
import os
from contextlib import suppress
from urllib.parse import urlparse


def has_key() -> bool:
    """Tell whether an API key is set for the server: in the environment or in netrc, where wandb looks."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname or "api.wandb.ai"
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False
