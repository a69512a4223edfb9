"""HTTP requests that are not redirected: urllib would send their credentials to the other server, too."""

from __future__ import annotations

import urllib.request
from http.client import HTTPMessage
from typing import IO


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an HTTPError: message and credentials are for the requested address alone."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> None:
        """Return None, for which urllib raises HTTPError."""
        return
