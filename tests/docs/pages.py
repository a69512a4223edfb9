"""The pages of the documentation as lists of code blocks, and their commands as they run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
LIMIT_S = 120.0

_FENCE = re.compile(r"^```(?P<language>\S*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"`([\w-]+\.(?:py|yaml))`")
_EXIT_CODE = re.compile(r"#\s*exits with (\d+)\s*$")


@dataclass(frozen=True)
class Block:
    """One fenced block; ``file`` is the name that the paragraph right before it gives the text."""

    page: Path
    line: int
    language: str
    text: str
    file: str | None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


@dataclass
class Command:
    """One ``$ …`` line, the lines of output that the page shows, and the exit code that it tells."""

    line: str
    shown: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        told = _EXIT_CODE.search(self.line)
        return int(told[1]) if told else 0


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return list(_blocks(page, text))


def _blocks(page: Path, text: str) -> Iterator[Block]:
    for match in _FENCE.finditer(text):
        paragraph = text[: match.start()].rstrip().rpartition("\n\n")[2]
        named = _FILE_NAME.findall(paragraph) if paragraph.endswith(":") else []
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page, line, match["language"], match["text"], named[-1] if named else None)


def commands(block: Block) -> list[Command]:
    """Return the commands of a ``console`` block."""
    found: list[Command] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append(Command(line.removeprefix("$ ")))
        elif line.strip():
            assert found, f"{block}: output before the first command"
            found[-1].shown.append(line)
    return found


def run(command: Command, folder: Path) -> tuple[int, str]:
    """Run it with the hpc-train of this interpreter and no GPU; return its exit code and all it printed."""
    own = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        ["bash", "-c", command.line],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "HPC_TRAIN_RUNS"} | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout


def missing_lines(shown: list[str], printed: str) -> list[str]:
    """Return the shown lines that were not printed, in this order; ``…`` is any text, blanks are alike."""
    left = iter(printed.splitlines())
    return [line for line in shown if not any(_matches(line, found) for found in left)]


def _matches(shown: str, found: str) -> bool:
    parts = [re.escape(" ".join(part.split())) for part in shown.split("…")]
    pattern = r"\s*.*?\s*".join(parts)
    return re.fullmatch(pattern, " ".join(found.split())) is not None
