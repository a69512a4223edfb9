"""Removes secrets from text that is printed or written: a run's folder and logs may be read by colleagues.

A secret is recognized by its position (user, password and secret query parameters of a URL) or by its value
(an environment variable such as ``WANDB_API_KEY``, or a password in ``.netrc``).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, quote_plus, unquote, urlsplit

if TYPE_CHECKING:
    from urllib.request import Request

#: Replaces a secret.
MARK = "[secret]"
#: Parts of the names of query parameters that are secret.
SECRET_PARAMETERS = ("pass", "token", "secret", "key")
_SECRET_WORDS = {
    "key", "keys", "apikey", "token", "tokens", "password", "passwd", "pass", "pwd", "passphrase", "secret",
    "secrets", "credential", "credentials", "pat",
}  # fmt: skip
#: Last words of names whose value is a secret's location or name.
_NO_SECRET = {"file", "path", "dir", "name", "type", "id", "url", "uri", "socket", "sock", "cmd", "command"}
#: Shorter values are not replaced: such as ``1``, they are part of other words.
_MIN_LENGTH = 4
#: Bytes of a file with credentials that are read.
_MAX_BYTES = 1 << 20
#: In names of secrets that are secret in any form.
_PASSWORD = re.compile(r"api[_-]?key|passw|passphrase|secret", re.IGNORECASE)
#: Keys that their form tells: of Hugging Face, OpenAI and others, GitHub, AWS.
_KEY = re.compile(r"\b(hf_[A-Za-z0-9]{30,}|sk-[\w-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|AKIA[A-Z0-9]{16})\b")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_PARAMETER = re.compile(r"(?<=[?&;])([^=&;#\s]+)=([^&;#\s'\"]*)")


def redacted(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the text without secrets.

    ``environment``: variables whose values are searched for; by default this process's.
    """
    text = without_credentials(text)
    secrets = known_secrets(os.environ if environment is None else environment)
    for secret in sorted(secrets, key=len, reverse=True):  # a secret may be a part of another
        text = text.replace(secret, MARK)
    return text


def without_credentials(text: str) -> str:
    """Return the text without user, password and secret parameters of its URLs."""
    return _URL.sub(lambda match: _without_parameters(_without_user(match[0])), text)


def is_secret(name: str, value: str, least: int = 16) -> bool:
    """Return True if a file that sets the name to this value contains a secret, by the form of both.

    ``least``: length from which a value of letters and digits is a token, if the name is that of one.
    """
    if _KEY.search(value) or re.search(r"://[^/\s:@]+:[^/\s@]+@", value):
        return True
    if not names_secret(name) or re.search(r"[\s/{}$]", value):
        return False
    if _PASSWORD.search(name):
        return len(value) >= _MIN_LENGTH
    return len(value) >= least and bool(re.search(r"\d", value) and re.search(r"[A-Za-z]", value))


def open_unredirected(request: Request, timeout_s: float) -> Any:
    """Send a request and return the answer. Raises HTTPError for a redirect, since urllib would send the
    credentials to the other server, too.
    """
    from urllib.request import HTTPRedirectHandler, build_opener  # slow to import

    handler = HTTPRedirectHandler()
    handler.redirect_request = lambda *_: None  # type: ignore[method-assign]
    return build_opener(handler).open(request, timeout=timeout_s)


def known_secrets(environment: Mapping[str, str]) -> set[str]:
    """Return the secrets in an environment, in netrc and in the files in which trackers store a key."""
    secrets = {
        value
        for name, value in environment.items()
        if names_secret(name) and not value.startswith(("/", "~/", "./"))
    }
    for value in environment.values():
        for url in _URL.findall(value) if "://" in value and "@" in value else ():
            secrets |= {password for password in [_password(url)] if password}
    for value in list(secrets) + list(_in_files(environment)):
        secrets |= {value, unquote(value), quote(value), quote(value, safe=""), quote_plus(value)}
    return {secret for secret in secrets if len(secret) >= _MIN_LENGTH}


def netrc_file(environment: Mapping[str, str]) -> Path:
    """Return the netrc file that Python's clients read."""
    if given := environment.get("NETRC"):
        return _expanded(given)
    own, other = _expanded("~/.netrc"), _expanded("~/_netrc")
    return other if other.exists() and not own.exists() else own


def names_secret(name: str) -> bool:
    """Return True if a variable or an option of this name probably has a secret."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return bool(words) and bool(_SECRET_WORDS & set(words)) and words[-1] not in _NO_SECRET


def _in_files(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the secrets of netrc, ``wandb login --host`` and ``mlflow login``; unreadable files have none."""
    with suppress(OSError, ValueError):
        words = shlex.split(_read(netrc_file(environment)), comments=False)
        yield from (secret for word, secret in pairwise(words) if word == "password")
    wandb = _expanded(environment.get("WANDB_CONFIG_DIR") or "~/.config/wandb") / "settings"
    for file in (wandb, _expanded("~/.mlflow/credentials")):
        with suppress(OSError):
            for line in _read(file).splitlines():
                name, _, value = line.partition("=")
                if names_secret(name.strip()):
                    yield value.strip()


def _expanded(path: str) -> Path:
    return Path(os.path.expanduser(path))  # noqa: PTH111  (unchanged if the user has no home folder)


def _read(file: Path) -> str:
    if not file.is_file():
        return ""
    with file.open("rb") as opened:
        return opened.read(_MAX_BYTES).decode("utf-8", "replace")


def _without_user(url: str) -> str:
    end = _end_of_user(url)
    return url if end is None else url[: url.index("://") + 3] + url[end:]


def _password(url: str) -> str | None:
    end = _end_of_user(url)
    if end is None:
        return None
    user, has_password, password = url[url.index("://") + 3 : end - 1].partition(":")
    return password if has_password else user


def _end_of_user(url: str) -> int | None:
    """Return the offset of the host; None if the URL has no user.

    A password may contain ``@``, and ``/``, ``?`` or ``#`` if it was not quoted. If in doubt, the offset is
    too large, so too much is removed.
    """
    begin = url.index("://") + 3
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError if the text behind the colon is not a port
        searched = parts.netloc + (parts.path if "@" in parts.netloc else "")
    except ValueError:
        searched = url[begin:]
    end = searched.rfind("@")
    return None if end < 0 else begin + end + 1


def _without_parameters(url: str) -> str:
    def shown(match: re.Match[str]) -> str:
        is_secret = any(word in match[1].lower() for word in SECRET_PARAMETERS)
        return f"{match[1]}={MARK}" if is_secret else match[0]

    return _PARAMETER.sub(shown, url)
