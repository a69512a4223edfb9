"""Writes docs/reliability.md: ``python -m tests.faults.reliability [-n WORKERS] [--report FILE]``.

Runs the tests that carry a fault's number, or reads the JUnit report of such a run. Exit code 1 where one of
them failed, or a fault has none that passed and no word why.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.faults.catalogue import TESTS, Row, catalogue
from tests.faults.soak import RESULTS

REPOSITORY = TESTS.parent
PAGE = REPOSITORY / "docs" / "reliability.md"
_HEAD = """\
# Reliability: faults and the tests that cause them

Written by `make reliability`, which causes each fault for real (signals, SIGKILL, full disks, a real Slurm of
four nodes on one machine) and checks that the run behaves as promised. Most tests end in the same check:
weights, buffers, optimizer state and metrics are bitwise identical to those of an uninterrupted run.
A quota, and a file server that fails, are injected at the call. All ranks are CPU ranks over gloo.
"""


@dataclass(frozen=True)
class Case:
    """One test case of a report."""

    #: ``tests/slurm/test_nodes.py``
    file: str
    #: Without its parameters.
    name: str
    faults: frozenset[int]
    #: ``passed``, ``failed``, ``skipped``
    result: str


@dataclass(frozen=True)
class Report:
    date: str
    cases: list[Case]


def read(path: Path) -> Report:
    """Read a JUnit report: its cases that carry a fault's number (tests/faults/conftest.py sees to that)."""
    root = ElementTree.parse(path).getroot()
    suite = root.find("testsuite")
    assert suite is not None, f"{path} is no JUnit report"
    cases = [_case(element) for element in root.iter("testcase")]
    return Report(suite.get("timestamp", "")[:10], [case for case in cases if case.faults])


def _case(element: ElementTree.Element) -> Case:
    marks = [each.get("value", "") for each in element.iter("property") if each.get("name") == "fault"]
    if element.find("failure") is not None or element.find("error") is not None:
        result = "failed"
    else:
        result = "passed" if element.find("skipped") is None else "skipped"
    file = element.get("classname", "").replace(".", "/") + ".py"
    name = element.get("name", "").partition("[")[0]
    return Case(file, name, frozenset(map(int, marks)), result)


def page(report: Report) -> str:
    rows = [_row(row, report) for row in catalogue()]
    table = ["| # | fault | promise | tests | result |", "| --- | --- | --- | --- | --- |", *rows]
    return "\n".join([_HEAD, *_soak(), *table]) + "\n"


def _row(row: Row, report: Report) -> str:
    cases = [case for case in report.cases if row.number in case.faults]
    tests = dict.fromkeys((case.file, case.name) for case in cases)
    links = [f"[{_title(name)}](../{file})" for file, name in sorted(tests)]
    notes = [f"waits for {row.waits_for}"] if row.waits_for else []
    notes += [f"not here: {row.not_here}"] if row.not_here else []
    notes += [f"differs from the promise: {row.departs}"] if row.departs else []
    result = "; ".join([_result(cases, report.date), *notes])
    return f"| {row.number} | {row.fault} | {row.promise} | {' · '.join(links)} | {result} |"


def _title(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


def _result(cases: Sequence[Case], date: str) -> str:
    counts = Counter(case.result for case in cases)
    told = [f"{counts[what]} {what}" for what in ("passed", "failed", "skipped") if counts[what]]
    return f"{', '.join(told)}, {date}" if told else "no test"


#: Titles of the ways in which a soak loses a node.
_NODE_LOSSES = ("StopSlurmd", "KillDaemons", "PowerCut")
_SOAK = """
`make soak` ({date}): {equal} of {seeds} runs on one and two nodes of a real Slurm ended bitwise identical
to uninterrupted ones after {total} random faults: {Kill} times SIGKILL of a rank or of all ranks of a node,
{Preemption} preemptions, {TimeLimit} time limits, {Requeue} times `scontrol requeue`, {Signals} times
SIGTERM or USR2 to ranks, and {lost} lost nodes (slurmd stopped, all daemons killed, or a power cut).
{in_place} attempts began in place. The runs train with DDP and FSDP, {programs} are programs; {spare_nodes}
have a spare node, {standby} ranks on standby, {workers} loader processes. In each run every attempt ended
for the reason that was caused, the budgets count these ends, after a kill the next attempt began in the
same allocation when it should, never after a preemption, a time limit, a signal or a requeue, and no
process of the run and no file in /dev/shm was left.
"""


def _soak() -> list[str]:
    """Return what the newest soak has shown."""
    if not RESULTS.exists():
        return []
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    runs = [run for run in results["runs"] if run["equal"]]
    faults = Counter(fault.partition(" at ")[0] for run in runs for fault in run["faults"])
    shapes = Counter(name for run in runs for name, value in run["shape"].items() if value)
    numbers = {
        "programs": sum(run["shape"]["strategy"] == "program" for run in runs),
        "total": faults.total(),
        "lost": sum(faults[title] for title in _NODE_LOSSES),
        "in_place": sum(sum(run["in_place"]) for run in runs),
    }
    values = defaultdict(int, results | faults | shapes | numbers)
    return [" ".join(_SOAK.split()).format_map(values), ""]


def is_sound(report: Report) -> bool:
    """Return True if nothing failed and each fault has a test that passed, or a word why it has none."""
    passed = {number for case in report.cases if case.result == "passed" for number in case.faults}
    left = [row for row in catalogue() if row.number not in passed and not (row.waits_for or row.not_here)]
    return not left and not any(case.result == "failed" for case in report.cases)


def run(workers: int) -> Report:
    """Run all tests that carry a fault's number, those of a soak with few seeds."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "fault", f"--junitxml={report}"]
        spread = ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
        subprocess.run([*command, *spread], cwd=REPOSITORY, check=False)
        return read(report)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Write docs/reliability.md.")
    parser.add_argument("-n", "--workers", type=int, default=1)
    parser.add_argument("--report", type=Path, help="a JUnit report to read instead of running the tests")
    arguments = parser.parse_args(words)
    report = read(arguments.report) if arguments.report else run(arguments.workers)
    PAGE.write_text(page(report), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(REPOSITORY)} from {len(report.cases)} cases", file=sys.stderr)
    return 0 if is_sound(report) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
