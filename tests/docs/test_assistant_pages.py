"""The page for coding assistants and llms.txt are generated, and lead to every page."""

from __future__ import annotations

import re

from docs.json_shapes import SHAPES
from docs.make_assistant_pages import DOCS, LIST, PAGE, files
from hpc_train.cli.app import app
from hpc_train.experiment.config.keys import json_schema
from tests.docs.pages import REPOSITORY


def test_both_files_are_up_to_date() -> None:
    stale = [name for name, text in files().items() if (DOCS / name).read_text(encoding="utf-8") != text]
    assert stale == [], "run python -m docs.make_assistant_pages"


def test_the_list_leads_to_every_page() -> None:
    text = (DOCS / LIST).read_text(encoding="utf-8")
    assert re.match(r"# hpc-train\n\n> .+", text), "the form of llmstxt.org"
    linked = re.findall(r"\]\(https://raw\.githubusercontent\.com/hpc-train/hpc-train/main/([^)#]+)", text)
    assert {f"docs/{page.name}" for page in DOCS.glob("*.md")} - {"docs/index.md"} <= set(linked)
    assert [path for path in linked if not (REPOSITORY / path).exists()] == []


def test_the_page_has_every_key_and_command() -> None:
    page = (DOCS / PAGE).read_text(encoding="utf-8")
    keys = json_schema()["properties"]
    assert [key for key in keys if f"`{key}`" not in page] == []
    assert {"**`task`**", "**`model`**", "**`optimization`**"} <= set(re.findall(r"\*\*`\w+`\*\*", page))
    for command in app.registered_commands:
        item = re.search(rf"^- `{command.name}[ `](?:.*\n)(?:  .*\n)*", page, re.MULTILINE)
        assert item, command.name
        assert ("`--json`" in item[0]) == (command.name in SHAPES), command.name
