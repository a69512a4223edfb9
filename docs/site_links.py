"""A hook of mkdocs: links that leave ``docs/`` lead to the repository, as they do on GitHub."""

from __future__ import annotations

from typing import Any


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Turn ``](../tests/x.py)`` into ``](https://…/blob/main/tests/x.py)``."""
    return markdown.replace("](../", f"]({config.extra['repository']}/blob/main/")
