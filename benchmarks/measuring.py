"""What all benchmarks share: interleaved rounds, ratios with their spread, and the form of a results file.

A benchmark compares *arms*, one of which is the baseline. Every round runs each arm once, in random order,
and ratios are taken within a round, so that a busy machine disturbs all arms alike. The files that ``write``
leaves in ``benchmarks/results/`` are what docs/performance.md is generated from.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MIN_ROUNDS = 7


def interleaved(arms: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every arm once per round, in random order; return the values of each arm by round."""
    values: dict[str, list[float]] = {arm: [] for arm in arms}
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


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, p10 and p90 with four significant digits. Two values at least."""
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    named = {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1]}
    return {name: float(f"{value:.4g}") for name, value in named.items()}


def conditions(packages: Sequence[str] = (), peers: Path | None = None) -> dict[str, Any]:
    """Return what a result holds for: date, device, cores, versions.

    ``packages``: distributions besides hpc-train and torch; those that are not installed are left out.
    ``peers``: a folder in which more of them are installed.
    """
    wanted = {"hpc-train", "torch", *packages}
    found = {each.name: each.version for each in metadata.distributions(path=[*sys.path, *_text(peers)])}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"cpu: {_processor()}",
        "cores": len(os.sched_getaffinity(0)),
        "versions": {"python": platform.python_version()}
        | {name: found[name] for name in sorted(wanted) if name in found},
    }


def _text(peers: Path | None) -> list[str]:
    return [] if peers is None else [str(peers)]


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def write(name: str, conditions: Mapping[str, Any], comparisons: Sequence[Mapping[str, Any]]) -> None:
    """Write ``benchmarks/results/<name>.json``; comparisons of other titles already in it stay.

    A comparison has the conditions of its own run, so a part of a benchmark can be run alone.
    """
    file = RESULTS / f"{name}.json"
    old = json.loads(file.read_text(encoding="utf-8")).get("comparisons", []) if file.exists() else []
    new = [{**each, "conditions": dict(conditions)} for each in comparisons]
    titles = {each["title"] for each in new}
    kept = [each for each in old if each["title"] not in titles]
    file.write_text(json.dumps({"comparisons": kept + new}, indent=1) + "\n", encoding="utf-8")
