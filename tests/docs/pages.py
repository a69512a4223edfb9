"""The pages of the documentation as lists of code blocks, and their commands as they run.

A page is one session in one folder. A line ``<!-- session -->`` begins another; ``<!-- session on Slurm -->``
one that runs on the test cluster.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_train.rank.env import count_gpus
from tests import warm
from tests.terminals import Terminal
from tests.waiting import HANG_LIMIT_S

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
#: Pages whose Python blocks belong together.
NOTEBOOKS = [page for page in PAGES if "<!-- notebook -->" in page.read_text(encoding="utf-8")]
LIMIT_S = HANG_LIMIT_S
#: On the test cluster ranks share this machine's cores, and ``logs -f`` follows them to their end.
SLURM_LIMIT_S = 400.0

_FENCE = re.compile(r"^```(?P<language>\S*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:py|yaml))`")
_SESSION = re.compile(r"^<!-- session(?P<slurm> on Slurm)? -->$", re.MULTILINE)
_EXIT_CODE = re.compile(r"#\s*exits with (\d+)\s*$")
#: What a shell expands outside of single quotes, none of which hides an ``hpc-train`` argument on any page.
_SHELL = re.compile(r"[|<>&;$`*?~]")
_MOMENT = re.compile(r"#\s*(once .+?)\s*$")


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


@dataclass(frozen=True)
class Session:
    """Blocks whose commands run in one folder, one after the other."""

    page: Path
    line: int
    on_slurm: bool
    blocks: list[Block]

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


@dataclass
class Command:
    """One ``$ …`` line, the lines of output that the page shows, and what its comment tells."""

    line: str
    shown: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        told = _EXIT_CODE.search(self.line)
        return int(told[1]) if told else 0

    @property
    def moment(self) -> str | None:
        """``once …``: what has to have happened before it is typed."""
        told = _MOMENT.search(self.line)
        return told[1] if told else None


def sessions(page: Path) -> list[Session]:
    """Return the page's sessions that type anything."""
    text = page.read_text(encoding="utf-8")
    starts = [(0, False), *((match.end(), bool(match["slurm"])) for match in _SESSION.finditer(text))]
    ends = [start for start, _ in starts[1:]] + [len(text)]
    found = []
    for (start, on_slurm), end in zip(starts, ends, strict=True):
        first, last = (text.count("\n", 0, offset) + 1 for offset in (start, end))
        inside = [block for block in blocks(page) if first <= block.line < last]
        if any(block.language == "console" for block in inside):
            found.append(Session(page, first, on_slurm, inside))
    return found


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


def play(
    session: Session, folder: Path, wait_until: Callable[[str], None] | None = None
) -> Iterator[tuple[str, Command, int, str]]:
    """Save the session's files and run its commands in ``folder``; yield where, which, exit code, output.

    ``wait_until``: brings about what a command's ``# once …`` says.
    """
    limit_s = SLURM_LIMIT_S if session.on_slurm else LIMIT_S
    for block in session.blocks:
        if block.file is not None:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text, encoding="utf-8")
        for command in commands(block) if block.language == "console" else ():
            if wait_until is not None and command.moment is not None:
                wait_until(command.moment)
            yield str(block), command, *run(command, folder, limit_s)


def run(command: Command, folder: Path, limit_s: float = LIMIT_S) -> tuple[int, str]:
    """Run it without a GPU; return its exit code and all it printed.

    A shell types what is more than a plain ``hpc-train …``; only its ranks are forked from a warm process.
    """
    words = shlex.split(command.line, comments=True)
    if words[:2] == ["hpc-train", "watch"]:
        return _watch(command, words[1:], folder, limit_s)
    is_plain = words[0] == "hpc-train" and not _SHELL.search(command.line.partition(" #")[0])
    start = warm.start if is_plain else subprocess.Popen
    with start(
        [sys.executable, "-m", "hpc_train", *words[1:]] if is_plain else ["bash", "-c", command.line],
        cwd=folder,
        env=_environment() | ({} if is_plain else warm.for_jobs()),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except BaseException:
            process.kill()
            raise
    return process.returncode, printed


def _watch(command: Command, words: Sequence[str], folder: Path, limit_s: float) -> tuple[int, str]:
    """Run it on a terminal until its screen shows what the page does; then press q."""
    with Terminal(*words, cwd=folder, environment=_environment(), columns=120) as terminal:
        terminal.wait_for(
            lambda: not missing_lines(command.shown, terminal.text), "\n".join(command.shown), limit_s
        )
        terminal.press("q")
        return terminal.wait(), terminal.text


def _environment() -> dict[str, str]:
    """Return the environment of a shell in which ``hpc-train`` is that of this interpreter."""
    own = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",  # two threads of one rank wait for each other most of the time on busy cores
    }
    if count_gpus(os.environ):
        own["CUDA_VISIBLE_DEVICES"] = ""
    return {name: value for name, value in os.environ.items() if name != "HPC_TRAIN_RUNS"} | own


def missing_lines(shown: list[str], printed: str) -> list[str]:
    """Return the shown lines that were not printed, in this order; ``…`` is any text, blanks are alike."""
    left = iter(printed.splitlines())
    return [line for line in shown if not any(_matches(line, found) for found in left)]


def _matches(shown: str, found: str) -> bool:
    parts = [re.escape(" ".join(part.split())) for part in shown.split("…")]
    pattern = r"\s*.*?\s*".join(parts)
    return re.fullmatch(pattern, " ".join(found.split())) is not None
