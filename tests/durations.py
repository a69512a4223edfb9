"""Where the tests' time goes: ``python -m tests.durations [pytest's arguments]`` writes ``durations.json``.

It runs pytest, and for each test with its fixtures measures the wall time and the CPU time of the test, of
all processes that it starts and of its worker's Slurm daemons. A session fixture counts for the first test
that uses it. Entries of test files that were not run stay as they are.

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
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

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


def _summary(lines: Sequence[str]) -> dict[str, dict[str, object]]:
    tests: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for node, wall, cpu in map(json.loads, lines):
        file, _, name = node.partition("::")
        tests[file][name] = (round(wall, 1), round(cpu, 1))
    return {
        file: {
            "count": len(found),
            "wall": round(sum(wall for wall, _ in found.values()), 1),
            "cpu": round(sum(cpu for _, cpu in found.values()), 1),
            "tests": {name: both for name, both in sorted(found.items()) if max(both) >= _SHORTEST_S},
        }
        for file, found in tests.items()
    }


def main(arguments: Sequence[str]) -> int:
    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    with tempfile.NamedTemporaryFile("r") as lines:
        command = [sys.executable, "-m", "pytest", "-p", "tests.durations", *arguments]
        code = subprocess.run(command, env=os.environ | {_LINES: lines.name}, check=False).returncode
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):  # files may lack tests
            return code
        files = before | _summary(lines.readlines())
    FILE.write_text(json.dumps(dict(sorted(files.items())), indent=1) + "\n")
    for name, entry in sorted(files.items(), key=lambda item: -item[1]["cpu"])[:20]:
        print(f"{entry['cpu']:8.1f} s CPU {entry['wall']:8.1f} s wall  {entry['count']:4} tests  {name}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
