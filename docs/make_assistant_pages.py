"""Writes docs/for_coding_assistants.md and docs/llms.txt: ``python -m docs.make_assistant_pages``.

The page is made of the schema, the commands' options and the types of their JSON; the list is docs/index.md.
A test compares both with ``files``.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import get_type_hints

import hpc_train.cli.app  # noqa: F401  (registers the commands)
from docs.make_json_page import comments, words
from docs.make_reference import default, sections, takes
from hpc_train.cli.command_line import FUNCTIONS, Options
from hpc_train.cli.run_row import RunRow
from hpc_train.experiment.config.keys import Node, json_schema
from hpc_train.registry import parts

DOCS = Path(__file__).parent
PAGE, LIST = "for_coding_assistants.md", "llms.txt"
_RAW = "https://raw.githubusercontent.com/hpc-train/hpc-train/main/"
#: Kind of parts → the key that names one.
_KINDS = {
    "models": "model.name",
    "datasets": "data.name",
    "tasks": "task",
    "strategies": "parallel.strategy",
    "loggers": "logging.loggers",
    "search": "sweep.search.method",
}
HEAD = """\
# For coding assistants

What a program needs that writes experiment files and follows runs: one file, one command line, JSON. This
page is generated from the schema and the commands by `python -m docs.make_assistant_pages`;
[llms.txt](llms.txt) lists all pages.

## Write, check, run, read

1. Write the smallest file that says what differs from the defaults. Save this as `task.yaml`:

```yaml
name: task
task: classification
model: {name: timm/test_resnet}
data: {name: digits}
optimization:
  steps: 20
  global_batch_size: 64
  micro_batch_size: 32
  optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
```

2. Validate it. All mistakes are listed at once as `FILE:LINE:COLUMN: KEY: problem; remedy`, with exit code
   65. Apply the remedies as written and validate again; do not guess keys.

```console
$ hpc-train validate task.yaml --json
 "problems": [],
$ hpc-train validate task.yaml optimization.micro_batch_size=20    # exits with 65
task.yaml:7:22: optimization.global_batch_size: 64 is not a multiple of micro_batch_size 20; write 60, …
```

3. Plan it, without a GPU: ranks, gradient accumulation, predicted memory, time and cost. Then submit it; on
   Slurm omit `--local`. The same file is not started twice.

```console
$ hpc-train plan task.yaml --local --json
 "name": "task",
$ hpc-train submit task.yaml --local --json
   "state": "completed",
```

4. Read the state as JSON, never from tables. A run that is `pending`, `running` or `requeued` continues by
   itself; `failed` has its cause in `reason`, and `hpc-train logs RUN` the rest.

```console
$ hpc-train status task --json
   "state": "completed",
```

Rules:

- Paths, names and numbers on the command line are `KEY=VALUE` with the keys below, such as
  `optimization.steps=50`.
- `optimization.global_batch_size` counts samples per optimizer step over all ranks. A change of the number
  of ranks changes neither it nor the learning rate.
- A sweep is one file: `sweep: {grid: {optimization.optimizer.lr: [0.1, 0.2]}}`. Do not write loops of
  submissions.
- Do not write a training loop, a launcher or an sbatch script. Own models, data and tasks are [functions
  and classes](plugins.md) that the file names as `module:name`.
- Never delete or edit files in a run folder; use `resume`, `cancel`, `clean` and `rm`. `cancel` is final:
  ask first.
"""


def files() -> dict[str, str]:
    """Return the names and contents of both files."""
    return {PAGE: "\n".join([HEAD, *_keys(), *_names(), *_commands(), *_row(), ""]), LIST: _list()}


def _keys() -> Iterator[str]:
    yield "## Keys\n\nA key in bold is required in its section. [Their meaning](reference_file.md).\n"
    for path, mapping in sections((), json_schema()):
        keys = [_key(key, node, mapping) for key, node in mapping["properties"].items()]
        yield _item(".".join(path) or "the file", ", ".join(keys))
    yield ""


def _key(key: str, node: Node, section: Node) -> str:
    value = default(key, node, section)
    if value.startswith("**"):
        return f"**`{key}`** ({takes(node)})"
    return f"`{key}` ({takes(node)}{f'; default: {value}' if value else ''})"


def _names() -> Iterator[str]:
    """Yield the built-in parts of each kind; those of plug-ins depend on the installation."""
    yield "## Names of parts\n\nOr `module:name`, your own code. [Arguments](reference_parts.md).\n"
    for kind, key in _KINDS.items():
        built_in = [name for name, target in parts(kind).items() if target.startswith("hpc_train.")]
        yield _item(key, ", ".join(f"`{name}`" for name in built_in))
    yield "\n`timm`, `torchvision`, `hf` and `smp` are providers: write `timm/resnet18`.\n"


def _commands() -> Iterator[str]:
    yield "## Commands\n\nEach has `--help`. [Effects and exit codes](reference_commands.md).\n"
    for options, function in FUNCTIONS.items():
        assert isinstance(function, partial)
        summary = " ".join((options.__doc__ or "").split("\n\n")[0].split())
        yield _item(" ".join([function.args[1], *_arguments(options)]), summary + _options(options))
    yield ""


def _arguments(options: type[Options]) -> Iterator[str]:
    for parameter in options.parameters().values():
        if parameter.names is None:
            metavar = str(parameter.settings["metavar"]).strip("[]")
            yield metavar if parameter.default is ... else f"[{metavar}{'…' * (parameter.default is list)}]"


def _options(options: type[Options]) -> str:
    """Return the options, the required ones in bold."""
    named = [
        f"**`{spelling}`**" if parameter.default is ... else f"`{spelling}`"
        for name, parameter in options.parameters().items()
        if parameter.names is not None
        for spelling in [(parameter.names or [f"--{name.replace('_', '-')}"])[0]]
    ]
    return f" Options: {', '.join(named)}." if named else ""


def _row() -> Iterator[str]:
    yield "## A run in the JSON of `status`, `submit`, `resume` and `cancel`\n"
    yield '`{"version": 1, "runs": [RUN, …]}`; each RUN has these fields. [Other commands](json.md).\n'
    meanings = comments(RunRow)
    for name, hint in get_type_hints(RunRow).items():
        yield _item(name, f"{words(hint)}. {meanings.get(name, '')}".strip().replace("](#", "](json.md#"))


def _item(code: str, text: str) -> str:
    joined = text.replace("at least", "at\N{NO-BREAK SPACE}least")  # in one line
    item = textwrap.fill(
        f"- `{code}`: {joined}", 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return item.replace("\N{NO-BREAK SPACE}", " ")


def _list() -> str:
    """Return docs/index.md in the form of llmstxt.org: absolute links to the pages' text."""
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    title, summary, rest = text.split("\n\n", 2)
    quoted = "\n".join(f"> {line}" for line in summary.splitlines())
    return "\n\n".join([title, quoted, re.sub(r"\]\((?!https?:)([^)]+)\)", _absolute, rest)])


def _absolute(link: re.Match[str]) -> str:
    path, _, anchor = link[1].partition("#")
    within = (DOCS / path).resolve().relative_to(DOCS.parent.resolve()) if path else Path("docs/index.md")
    return f"]({_RAW}{within}{'#' * bool(anchor)}{anchor})"


if __name__ == "__main__":
    for name, text in files().items():
        (DOCS / name).write_text(text, encoding="utf-8")
