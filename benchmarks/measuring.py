"""What all benchmarks share: options, interleaved rounds, ratios with their spread, and the results files.

A benchmark compares *arms*, one of which is the baseline. Every round runs each arm once, in random order,
and ratios are taken within a round, so that a busy machine disturbs all arms alike. What is counted rather
than timed, or compared with a formula, is a *table*. A results file in ``benchmarks/results/`` is

    {"comparisons": [what ``comparison`` returns, with its conditions, …],
     "tables": [what ``table`` or ``growth`` returns, with its conditions, …]}

docs/performance.md is generated from these files (``benchmarks.performance_page``). A ``p10`` or ``p90`` that
is null was not recorded.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, TypeVar

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MIN_ROUNDS = 7
QUICK_ROUNDS = 2
#: Exit code of a benchmark that can't run on this machine.
NOT_MEASURED = 3
#: An arm's name, and what it returns: a time, or several by name.
Arm = TypeVar("Arm")
Value = TypeVar("Value")


def parser(doc: str | None, rounds: int = MIN_ROUNDS) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark: ``--rounds``, ``--quick`` and ``--peers``."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds, help=f"at least {MIN_ROUNDS}; default: {rounds}")
    made.add_argument(
        "--quick", action="store_true", help="a trial of seconds: small, and nothing is written"
    )
    made.add_argument(
        "--peers", type=Path, help="where requirements-peers.txt was installed (make bench-peers)"
    )
    return made


def rounds_of(arguments: argparse.Namespace) -> int:
    """Return how many rounds ``parser``'s options ask for."""
    return QUICK_ROUNDS if arguments.quick else max(arguments.rounds, MIN_ROUNDS)


def cannot_run(why: str) -> NoReturn:
    """End a benchmark that can't run on this machine; say what it needs."""
    print(f"not measured: {why}", file=sys.stderr)
    raise SystemExit(NOT_MEASURED)


def interleaved(arms: Mapping[Arm, Callable[[], Value]], rounds: int) -> dict[Arm, list[Value]]:
    """Run every arm once per round, in random order; return the values of each arm by round."""
    values: dict[Arm, list[Value]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm in random.sample(list(arms), len(arms)):
            values[arm].append(arms[arm]())
    return values


def comparison(
    title: str,
    unit: str,
    values: Mapping[str, Sequence[float]],
    baseline: str,
    not_measured: Sequence[str] = (),
) -> dict[str, Any]:
    """Return one table of a results file: per arm the values' spread and that of its ratio to ``baseline``.

    ``values``: by arm, one value per round. ``not_measured``: arms that can't run here.
    """
    arms = {
        arm: spread(of_arm)
        | {"ratio": spread([value / base for value, base in zip(of_arm, values[baseline], strict=True)])}
        for arm, of_arm in values.items()
    }
    return {
        "title": title,
        "unit": unit,
        "baseline": baseline,
        "rounds": len(values[baseline]),
        "arms": arms,
        "not measured": list(not_measured),
    }


def table(
    title: str,
    unit: str,
    rows: Mapping[str, Mapping[str, float | None]],
    not_measured: Sequence[str] = (),
    remark: str = "Measured once",
) -> dict[str, Any]:
    """Return a table of a results file for what has no rounds: counts, or values beside a formula's.

    ``rows``: by row and column. None: there is no value. ``unit``: empty if the columns' names contain it.
    ``remark``: how the values were obtained.
    """
    rounded = {row: {column: _rounded(value) for column, value in by.items()} for row, by in rows.items()}
    return {
        "title": title,
        "unit": unit,
        "rows": rounded,
        "not measured": list(not_measured),
        "remark": remark,
    }


def growth(
    title: str,
    unit: str,
    costs: Mapping[str, Mapping[int, float]],
    variable: str,
    *,
    since: int = 1,
    remark: str = "Measured once",
) -> dict[str, Any]:
    """Return a table of costs by number of ``variable`` (``runs``), each with its fitted ``exponent``.

    ``since``: the smallest number that enters the fit. A cost of one such number has no exponent.
    """
    rows = {
        cost: {f"{number:,} {variable}": value for number, value in by.items()} for cost, by in costs.items()
    }
    exponents = {
        cost: _rounded(exponent({number: value for number, value in by.items() if number >= since}))
        for cost, by in costs.items()
    }
    return table(title, unit, rows, remark=remark) | {"variable": variable, "exponents": exponents}


def exponent(costs: Mapping[int, float]) -> float | None:
    """Return e of cost ∝ n^e: by least squares of log cost over log n; None for fewer than two n."""
    points = [(math.log(number), math.log(cost)) for number, cost in costs.items() if cost > 0]
    if len(points) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, p10 and p90 with four significant digits. Two values at least."""
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    named = {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1]}
    return {name: float(f"{value:.4g}") for name, value in named.items()}


def _rounded(value: float | None) -> float | None:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def conditions(
    packages: Sequence[str] = (), peers: Path | None = None, device: str | None = None
) -> dict[str, Any]:
    """Return what a result holds for: date, device, cores, load average at this moment, versions.

    ``packages``: distributions besides hpc-train and torch; those that are not installed are omitted.
    ``peers``: a folder in which more of them are installed. ``device``: where the arms ran; default: the CPU.
    """
    wanted = {"hpc-train", "torch", *packages}
    found = {each.name: each.version for each in metadata.distributions(path=[*sys.path, *_text(peers)])}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device or f"cpu: {_processor()}",
        "cores": len(os.sched_getaffinity(0)),
        "load average": round(os.getloadavg()[0], 1),
        "versions": {"python": platform.python_version()}
        | {name: found[name] for name in sorted(wanted) if name in found},
    }


def _text(peers: Path | None) -> list[str]:
    return [] if peers is None else [str(peers)]


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def report(
    name: str,
    arguments: argparse.Namespace,
    conditions: Mapping[str, Any],
    comparisons: Sequence[Mapping[str, Any]] = (),
    tables: Sequence[Mapping[str, Any]] = (),
    results: Path | None = None,
) -> None:
    """Print the result; write it too, unless ``--quick`` was given without a folder ``results``."""
    print(json.dumps({**conditions, "comparisons": comparisons, "tables": tables}, indent=1), flush=True)
    if not arguments.quick or results is not None:
        write(name, conditions, comparisons, tables, results)


def write(
    name: str,
    conditions: Mapping[str, Any],
    comparisons: Sequence[Mapping[str, Any]] = (),
    tables: Sequence[Mapping[str, Any]] = (),
    results: Path | None = None,
) -> None:
    """Write ``benchmarks/results/<name>.json``; comparisons and tables of other titles already in it stay.

    Each has the conditions of its own run, so a part of a benchmark can be run alone.
    """
    folder = results or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    merged = {
        "comparisons": _merged(old.get("comparisons", []), comparisons, conditions),
        "tables": _merged(old.get("tables", []), tables, conditions),
    }
    file.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")


def _merged(
    old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], conditions: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    titles = {each["title"] for each in new}
    return [
        *(each for each in old if each["title"] not in titles),
        *({**each, "conditions": dict(conditions)} for each in new),
    ]
