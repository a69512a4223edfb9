"""Benchmarks: what they share, and that each starts. None asserts a time."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from benchmarks import (
    compile_start,
    gpu_cluster,
    gpu_throughput,
    measuring,
    performance_page,
    plot,
    ranks,
    step,
    turns,
)
from benchmarks.gpu_cases import CASES, MODELS, Case, utilization
from benchmarks.gpu_loop import flops_per_sample
from benchmarks.measuring import ROOT, comparison, exponent, growth, interleaved, parser, rounds_of, table
from tests.end_to_end.runs import hpc_train, write_experiment

#: Programs that measure nothing.
_OTHERS = {"__main__", "gpu_loop", "loops", "performance_page"}
#: Scripts that submission.py, preemption.py and restart.py start as an arm.
_ARMS = {"bare_submission", "bare_training", "restart_training"}
PROGRAMS = sorted(
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if path.stem not in _ARMS and '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)


#: Leaves its session and writes its name 40 times.
_WRITES = """
import os, sys, time

os.setsid()
for _ in range(40):
    with open(sys.argv[1], "a") as file:
        file.write(sys.argv[2] + "\\n")
    time.sleep(0.02)
"""


@pytest.mark.slow
def test_programs_that_take_turns_run_one_at_a_time(tmp_path: Path) -> None:
    """Each with its children, whatever their session."""

    def work(arm: str) -> float:
        subprocess.run([sys.executable, "-c", _WRITES, str(tmp_path / "written"), arm], check=True)
        return len(arm)

    arms = ("a", "bb", "ccc")
    values = turns.by_turns({arm: functools.partial(work, arm) for arm in arms}, turn_s=0.3)
    assert values == {arm: len(arm) for arm in arms}
    written = (tmp_path / "written").read_text().split()
    taken = [arm for arm, _ in itertools.groupby(written)]
    assert len(written) == 120 and 4 <= len(taken) < 60, taken


@pytest.mark.slow
def test_a_program_that_fails_ends_the_others(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def fail() -> float:
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.01)
        raise ValueError("on purpose")

    def wait() -> float:
        pid.write_text(str(os.getpid()))
        time.sleep(600)
        return 0.0

    with pytest.raises(RuntimeError, match=r"(?s)fails: .*on purpose"):
        turns.by_turns({"waits": wait, "fails": fail}, turn_s=0.3)
    assert not psutil.pid_exists(int(pid.read_text()))


def test_only_windows_with_a_turn_of_another_program_are_left_out() -> None:
    assert turns.undisturbed([0.2, 0.1, 2.3, 0.12, 4.0, 1.0, 0.15], window=1) == pytest.approx(0.15)
    assert turns.undisturbed([0.1, 0.1, 0.2, 0.3], window=20) == pytest.approx(0.1)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_says_how_to_use_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"python -m benchmarks{'.' + name if name != '__main__' else ''}" in shown
    assert name in _OTHERS or "--quick" in shown


def test_a_machine_without_a_gpu_is_told_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_throughput"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        gpu_throughput.main()
    assert ended.value.code == measuring.NOT_MEASURED
    assert capsys.readouterr().err.startswith("not measured: there is no CUDA device")


def test_a_gpu_run_ends_when_its_time_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, 60)  # a minute per reading: each case takes one
    monkeypatch.setattr("benchmarks.gpu_throughput.time.monotonic", lambda: float(next(clock)))
    assert len(list(gpu_throughput.within(9, CASES))) == 4
    assert CASES[0] == Case("gpt", "bf16")


def test_a_mode_of_compile_counts_when_it_ends_not_after_the_slowest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    wait = (
        "import os, time\nfor _ in range(2000):\n"
        f"  if os.path.exists({str(gate)!r}): break\n  time.sleep(0.01)\n"
    )

    def child(scope: str, num_blocks: int, mode: str) -> list[str]:
        if mode == "reduce-overhead":
            return [sys.executable, "-c", "raise SystemExit(1)"]
        return [sys.executable, "-c", f"{wait if scope == 'eager' else ''}print('seconds:', 2.0, 0.5)"]

    monkeypatch.setattr(compile_start, "_child", child)
    ended = {}
    for title, row in compile_start.cuda_modes(1):
        ended[title] = row
        if len(ended) == 4:  # two modes of each scope
            gate.touch()
    assert list(ended)[4:] == ["eager"] and not any("reduce" in title for title in ended)
    assert ended["eager"] == {"first step": 2.0, "step": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hsdp", "tensor", "pipeline"])
def test_two_nodes_with_eight_gpus_can_train_each_strategy(strategy: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 2000)
    slurm = {"slurm": {"nodes": 2, "gpus_per_node": 8, "time_limit": "30min"}}
    file = write_experiment(
        tmp_path, json.dumps(gpu_cluster.experiment_of(strategy, text, is_quick=False) | slurm)
    )
    done = hpc_train("plan", file, PATH=str(Path(sys.executable).parent))
    assert done.code == 0, done.err
    assert "16 " in done.out, "ranks"


def test_consensus_and_watchdog_request_no_more_of_many_nodes_than_of_one() -> None:
    one, many = (ranks.simulated(number) for number in (ranks.RANKS_PER_NODE, 1024))
    assert one == many
    assert many["collectives per step"] == 1 and many["bytes per step"] == 6 * 8


@pytest.mark.slow
def test_flops_and_utilization() -> None:
    """4.1 G multiply-accumulates forward (He et al. 2015), of which the backward pass has twice as many."""
    flops = flops_per_sample(MODELS["resnet50"])
    assert flops == pytest.approx(3 * 2 * 4.1e9, rel=0.01)
    assert utilization("NVIDIA H100 80GB HBM3", "bf16", 98.9e12) == pytest.approx(0.1)
    assert utilization("Some GPU", "bf16", 1e12) is None


def test_every_benchmark_has_a_section_of_the_page() -> None:
    listed = [name for names in performance_page.SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(set(PROGRAMS) - _OTHERS)


def test_some_arms_of_a_step_include_what_they_are_compared_with() -> None:
    arms = dict.fromkeys(("bare loop", "Fabric", "Accelerate", "hpc-train"), float)
    assert list(step._chosen(arms, ["Fabric"])) == ["bare loop", "Fabric", "hpc-train"]
    assert step._chosen(arms, None) == arms


def test_every_round_runs_each_arm_once() -> None:
    calls: list[str] = []
    arms = {arm: lambda arm=arm: calls.append(arm) or len(calls) for arm in "abc"}  # type: ignore[misc]
    values = interleaved(arms, rounds=4)
    assert [sorted(calls[start : start + 3]) for start in range(0, 12, 3)] == [["a", "b", "c"]] * 4
    assert sorted(itertools.chain(*values.values())) == list(range(1, 13))


def test_ratios_are_taken_within_a_round() -> None:
    found = comparison("t", "seconds", {"bare": [1.0, 10.0, 100.0], "ours": [2.0, 20.0, 200.0]}, "bare")
    assert found["arms"]["ours"]["ratio"] == {"median": 2.0, "p10": 2.0, "p90": 2.0}
    assert found["arms"]["ours"]["median"] == 20.0 and found["rounds"] == 3


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_is_fitted(power: float) -> None:
    assert exponent({n: 3.0 * n**power for n in (100, 1000, 10_000)}) == pytest.approx(power)


def test_the_page_says_how_a_cost_grows(tmp_path: Path) -> None:
    costs = {"hpc-train: status": {1: 1.0, 100: 1.0, 1000: 10.0}, "once": {100: 1.0}}
    grown = growth("Growth", "seconds", costs, "runs", since=100) | {"conditions": {"versions": {}}}
    (tmp_path / "submission.json").write_text(json.dumps({"tables": [grown]}))
    page = performance_page.generated(tmp_path)["performance.md"]
    assert "| seconds | 1 runs | 100 runs | 1,000 runs | grows as (n: runs) |" in page
    assert "| **hpc-train: status** | 1 | 1 | 10 | n^1.00 |" in page
    assert "| once |  | 1 |  |  |" in page


def test_a_quick_trial_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "RESULTS", tmp_path)
    quick, whole = (parser(None).parse_args(words) for words in (["--quick"], ["--rounds", "3"]))
    assert rounds_of(quick) == 2 and rounds_of(whole) == 7
    rows = table("t", "files", {"a": {"b": 1}})
    measuring.report("x", quick, {}, tables=[rows])
    assert list(tmp_path.iterdir()) == []
    measuring.report("x", whole, {"cores": 2}, tables=[rows])
    measuring.report("x", whole, {"cores": 3}, tables=[table("other", "files", {})])
    kept = json.loads((tmp_path / "x.json").read_text())
    assert [(each["title"], each["conditions"]["cores"]) for each in kept["tables"]] == [
        ("t", 2),
        ("other", 3),
    ]
    assert kept["comparisons"] == []


def test_a_plot_shows_medians_and_spread_on_one_axis() -> None:
    arms = {
        "bare": {"median": 1.0, "p10": 1.0, "p90": 1.0},
        "hpc-train <x>": {"median": 0.25, "p10": 0.125, "p90": 0.5},
        "peer": {"median": 2.0, "p10": None, "p90": None},
    }
    root = ElementTree.fromstring(plot.ratio_plot("Step", "bare", arms, lambda arm: arm.startswith("hpc")))
    svg = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in root.iter(f"{svg}text")]
    assert "hpc-train <x>" in texts and "0.250 (0.125–0.500)" in texts and "2.00" in texts
    assert root.findtext(f"{svg}title") == "Step" and "peer: 2.00" in (root.findtext(f"{svg}desc") or "")
    bare, ours, peer = (float(dot.attrib["cx"]) for dot in root.iter(f"{svg}circle"))
    assert (bare - ours) / (peer - bare) == pytest.approx(2, abs=0.01)  # a quarter and twice, logarithmic
    assert [path.attrib["class"] for path in root.iter(f"{svg}path")] == ["peer", "ours"]
    (line,) = (line for line in root.iter(f"{svg}line") if line.attrib["class"] == "baseline")
    assert float(line.attrib["x1"]) == bare
