"""Hooks of mkdocs: links that leave ``docs/`` lead to the repository, as on GitHub; accessible markup."""

from __future__ import annotations

import re
from typing import Any

_EMPTY_HEADER = re.compile(r"<th([^>]*)></th>")


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Turn ``](../tests/x.py)`` into ``](https://…/blob/main/tests/x.py)``."""
    return markdown.replace("](../", f"]({config.extra['repository']}/blob/main/")


def on_page_content(html: str, **_: Any) -> str:
    """Make cells of table headers that are empty; a header without a text can't be read out."""
    return _EMPTY_HEADER.sub(r"<td\1></td>", html)


def on_post_page(output: str, **_: Any) -> str:
    """Name the theme's search dialog."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')
