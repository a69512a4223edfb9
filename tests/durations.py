"""Where the tests' time goes: ``python -m tests.durations [pytest's arguments]`` writes ``durations.json``.

It runs pytest, and for each test with its fixtures measures the wall time and the CPU time of the test, of
all processes that it starts and of its worker's Slurm daemons. A session fixture counts for the first test
that uses it. Entries of test files that were not run stay as they are.

``python -m tests.durations --from FILE.xml …`` reads wall times from files of ``pytest --junitxml`` instead,
of a test in several files from the last one. Tests that ``make test`` no longer runs are omitted.

conftest.py asks for an order of the tests by it, in which no worker is busy long after the others.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests import warm

FILE = Path(__file__).with_suffix(".json")
#: Where processes of pytest add a line per test: node id, wall seconds, CPU seconds.
_LINES = "HPC_TRAIN_TEST_DURATIONS"
#: Tests that take less wall time and less CPU time count only in their file's sums.
_SHORTEST_S = 1.0
#: Of a slow test that was not measured.
_ASSUMED_S = 10.0
T = TypeVar("T")


def in_order(groups: Mapping[tuple[str, bool], Sequence[T]], quick: Sequence[T], num_workers: int) -> list[T]:
    """Return all tests such that equal consecutive parts, one per worker, take about equally long.

    pytest-xdist's ``worksteal`` gives out such parts, and an idle worker takes over the end of another's. So
    a part begins with what takes longest and ends with quick tests. ``groups``: slow tests by file, or each
    by its own node id where it needs Slurm (then the second is true). Those wait most of their time: they
    come first, in all parts but the last two, whose tests need the cores meanwhile.
    """
    measured = json.loads(FILE.read_text()) if FILE.exists() else {}

    def seconds(group: tuple[str, bool]) -> float:
        file, _, test = group[0].partition("::")
        if file not in measured:
            return _ASSUMED_S * len(groups[group])
        # A test that needs Slurm and is not listed is a new one: shorter ones are few.
        return float(measured[file]["tests"].get(test, (_ASSUMED_S,))[0] if test else measured[file]["wall"])

    parts: list[list[T]] = [[] for _ in range(num_workers)]
    busy = [0.0] * num_workers
    for group in sorted(groups, key=lambda group: (not group[1], -seconds(group), group)):
        open_to_it = busy[: max(1, num_workers - 2)] if group[1] else busy
        part = open_to_it.index(min(open_to_it))
        parts[part] += groups[group]
        busy[part] += seconds(group)
    rest, num_left = list(quick), len(quick) + sum(map(len, parts))
    for number, part in enumerate(parts):
        missing = max(0, num_left // (num_workers - number) - len(part))
        part.extend(rest[:missing])
        del rest[:missing]
        num_left -= len(part)
    return [test for part in parts for test in part]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measure the test, with the fixtures that it sets up and tears down."""
    clock = _cpu_clock()
    wall, cpu = time.monotonic(), clock()
    result = yield
    line = json.dumps([item.nodeid, time.monotonic() - wall, clock() - cpu])
    with Path(os.environ[_LINES]).open("a") as lines:
        lines.write(f"{line}\n")
    return result


@functools.cache
def _cpu_clock() -> Callable[[], float]:
    """Return a clock of the CPU seconds of this process and of all that it starts from now on.

    A control group counts them, whatever their parent is by then, and this process's fork server with what
    it forks. Where none can be made (no root), only children that were waited for count.
    """
    root = Path("/sys/fs/cgroup")
    for parent, name, unit in ((root / "cpuacct", "cpuacct.usage", 1e9), (root, "cpu.stat", 1e6)):
        group = parent / f"hpc-train-tests-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            for pid in filter(None, (os.getpid(), warm.server_pid())):
                (group / "cgroup.procs").write_text(str(pid))
            usage = group / name  # in version 2 the first line is "usage_usec <number>"
            return lambda: int(usage.read_text().split("\n")[0].split()[-1]) / unit
    return lambda: sum(os.times()[:4])


def _summary(measured: Iterable[Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Return the entries of files; ``measured``: node id, wall seconds and, if measured, CPU seconds."""
    tests: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for node, *seconds in measured:
        file, _, name = node.partition("::")
        tests[file][name] = [round(each, 1) for each in seconds]
    return {
        file: {
            "count": len(times),
            **{
                clock: round(sum(each), 1)
                for clock, each in zip(("wall", "cpu"), zip(*times.values(), strict=True), strict=False)
            },
            "tests": {name: both for name, both in sorted(times.items()) if max(both) >= _SHORTEST_S},
        }
        for file, times in tests.items()
    }


def _from_junit(paths: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the entries of all files of tests that ``make test`` runs and these junit files have."""
    wall: dict[str, float] = {}
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            if case.find("skipped") is None:
                file = case.attrib["classname"].replace(".", "/")
                wall[f"{file}.py::{case.attrib['name']}"] = float(case.attrib["time"])
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not soak"]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    return _summary((node, wall[node]) for node in listed if node in wall)


def main(arguments: Sequence[str]) -> int:
    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    if arguments[:1] == ["--from"]:
        _write(_from_junit(arguments[1:]))
        return 0
    with tempfile.NamedTemporaryFile("r") as lines:
        command = [sys.executable, "-m", "pytest", "-p", "tests.durations", *arguments]
        code = subprocess.run(command, env=os.environ | {_LINES: lines.name}, check=False).returncode
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):  # files may lack tests
            return code
        _write(before | _summary(map(json.loads, lines)))
    return code


def _write(files: Mapping[str, dict[str, Any]]) -> None:
    FILE.write_text(json.dumps(dict(sorted(files.items())), indent=1) + "\n")
    for name, entry in sorted(files.items(), key=lambda item: -item[1]["wall"])[:20]:
        cpu = f"{entry['cpu']:8.1f} s CPU " if "cpu" in entry else ""
        print(f"{cpu}{entry['wall']:8.1f} s wall  {entry['count']:4} tests  {name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
