"""What ``replay`` refuses before any rank starts, and how a replay reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hpc_train.cli import replay as module
from hpc_train.cli.replay import _replayed
from hpc_train.cli.replayed_run import ReplayedRun
from hpc_train.paths import RunPaths
from hpc_train.report.replayed_steps import Replay, replay_text
from hpc_train.run.run_status import RunStatus, write_status
from tests.cli.commands import hpc_train, stderr_of
from tests.run.runs import change_facts
from tests.run.test_digests import write_digests


@pytest.fixture
def run(saved: RunPaths) -> RunPaths:
    write_status(saved, RunStatus(total_steps=20))
    return saved


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.root=x", "--step", "3"], "replay: names no run; give a run id"),
        (["abc"], "--step"),
        (["abc", "--step", "0"], "--step"),
        (["abc", "--step", "21"], "--step: 21 is past the last step of the run, 20"),
        (["abc", "--step", "3", "--to", "30"], "--to: 30 is past the last step of the run, 20"),
        (["abc", "--step", "7", "--to", "6"], "--to: 6 is before --step 7; write 7 or a later step"),
        (["abc", "--step", "3", "--set", "seed=4"], "seed: can't be changed in a replay"),
        (["abc", "model.name=gpt", "--step", "3"], "model.name: can't be changed in a replay"),
        (
            ["abc", "--step", "3", "--set", "optimization.global_batch_size=8"],
            "optimization.global_batch_size: can't be changed in a replay",
        ),
        (["abc", "--step", "3", "--set", "precision"], "--set: precision has no value; write KEY=VALUE"),
        (["abc", "--step", "3", "--set", "precison=fp32"], "precison: can't be changed in a replay"),
        (["abc", "--step", "3", "--save-batch", "b.pt"], "--save-batch: b.pt must end in .safetensors"),
        (["abc", "--step", "3", "--profile", "trace.txt"], "--profile: trace.txt must end in .json.gz"),
        (["abc", "--step", "3", "--save-samples", "."], "--save-samples: . exists; give another name"),
        (
            ["abc", "compile=true", "--step", "3", "--activations"],
            "--activations: a compiled model does not call its modules one by one; add compile=false",
        ),
        (
            ["abc", "--step", "3", "--debugger", "--devices", "2"],
            "--debugger: stops one rank, and this replay has 2, which would wait for it; add --devices 1",
        ),
        (
            ["abc", "--step", "3", "--debugger", "--devices", "1", "--set", "precision=bf16"],
            "--debugger: can't be combined with --set; write KEY=VALUE to debug a changed step",
        ),
        (["abc", "--step", "3", "--debugger", "--devices", "1", "--json"], "can't be combined with --json"),
    ],
)
def test_mistakes_are_named_before_any_rank_starts(
    run: RunPaths, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LocalLauncher", None)
    assert message in stderr_of(2, "replay", *words)


@pytest.mark.parametrize(("first", "begin"), [(1, 0), (5, 0), (6, 5), (10, 5), (11, 10), (20, 10)])
def test_a_replay_begins_at_the_newest_checkpoint_before_the_step(
    run: RunPaths, first: int, begin: int
) -> None:
    """The checkpoint of step 10 has the state after that step."""
    stretch, _ = module._stretch(ReplayedRun(run, "abc", uses_new_code=False), first, first)
    assert stretch.begin == begin


def test_the_ranks_of_steps_are_those_that_trained_them(resumed: ReplayedRun) -> None:
    """2 ranks saved the checkpoint of step 5, from which one continued."""

    def parts(begin: int, last: int) -> list[tuple[int, int, int | None]]:
        return [(part.begin, part.last, part.ranks) for part in resumed.trained(begin, last)]

    assert parts(0, 5) == [(0, 5, 2)] and parts(5, 6) == [(5, 6, 1)]
    assert parts(0, 12) == [(0, 5, 2), (5, 7, 1), (7, 12, 2)]
    write_digests(resumed.paths.digests, [1] * 5 + [3] * 7)
    assert parts(0, 12) == [(0, 12, 2)], "the steps of attempt 2 were trained again"
    change_facts(resumed.paths, changes={"3": ["parallel.strategy=fsdp"]})
    assert parts(0, 12) == [(0, 5, 2), (5, 12, 2)]
    strategies = [part.experiment.parallel.strategy for part in resumed.trained(0, 12)]
    assert strategies == ["ddp", "fsdp"]
    resumed.paths.digests.unlink()
    assert parts(0, 5) == [(0, 5, 2)], "that saved its checkpoint"


@pytest.mark.parametrize(
    ("first", "last", "ranks", "words"),
    [(6, 6, 1, ""), (4, 4, 2, ""), (3, 10, 2, "the run trained these steps on 2, then 1, then 2 ranks")],
)
def test_a_replay_has_as_many_ranks_as_trained_its_last_step(
    first: int, last: int, ranks: int, words: str, resumed: ReplayedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that differ fail a replay unless several numbers of ranks trained its steps."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)

    def run_stretch(stretch: module.Stretch, _: Any, __: Any, num_ranks: int, *___: Any, **____: Any) -> Any:
        assert (num_ranks, stretch.ranks_of_run) == (ranks, ranks)
        lines = [line(last, rank) for rank in range(ranks)]
        lines[0]["recorded"] = lines[0]["recorded"] | {"loss": 7.0}
        return [[of_rank] for of_rank in lines]

    monkeypatch.setattr(module, "run_stretch", run_stretch)
    done = hpc_train("replay", "abc", "--step", str(first), "--to", str(last))
    assert done.code == (0 if words else 1) and words in done.err.replace("\n", " "), done.err


def test_the_ranks_have_the_threads_of_the_run(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {"device": "cpu", "hardware": {"threads": [3, 3]}}
    run.checkpoint(5).state.write_text(json.dumps({"extra": extra}))
    given: list[dict[str, str]] = []

    def run_stretch(*_: Any, variables: dict[str, str], **__: Any) -> None:
        given.append(variables)

    monkeypatch.setattr(module, "run_stretch", run_stretch)
    stderr_of(1, "replay", "abc", "--step", "3")
    assert given == [{"OMP_NUM_THREADS": "3"}], "from the start: no checkpoint restores them"


def line(step: int, rank: int, **changes: Any) -> dict[str, Any]:
    batch = {"number": rank, "loss": 1.0 + rank, "samples": [rank, 7], "files": [], "texts": ["a\tb", "c"]}
    digest = {"samples": "0a", "loss": 1.5, "grad_norm": None, "attempt": 0}
    of_first = {"digest": digest, "recorded": digest | {"attempt": 1}} if rank == 0 else {}
    return {
        "step": step, "learning_rate": 0.1, "micro_batches": [batch], "squares": {"a": 9.0, f"b{rank}": 4.0},
        "non_finite": None, "ranges": {"a": [-1.0, 2.0 + rank, 6.0, 4.0], "nan": [float("nan")] * 4},
        **of_first, **changes,
    }  # fmt: skip


def text_of(*ranks: dict[str, Any], names: list[str] | None = None) -> str:
    replayed = _replayed([], [[rank] for rank in ranks], names or ["samples", "loss", "grad_norm"])
    answer = Replay(id="a", path="a", checkpoint=0, ranks=2, ranks_of_run=2, replays=[replayed])
    return "\n".join(replay_text(answer))


def test_parts_of_ranks_are_added_up() -> None:
    text = text_of(line(4, 0), line(4, 1))
    assert "step 4: loss 1.5, gradient norm 5.09902, learning rate 0.1" in text
    assert "bitwise identical to the run: samples, loss" in text and "gradient norm, 3 modules" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["a", "4.24264"] in rows, "of both ranks"
    assert ["a", "-1", "3", "1.5"] in rows and ["nan", *["NaN", "or", "infinite"] * 3] in rows
    assert [row[:2] for row in rows if row[-1:] in (["a\\tb"], ["c"])] == [
        ["1", "a\\tb"], ["7", "c"], ["0", "a\\tb"], ["7", "c"],
    ], "the highest loss first"  # fmt: skip
    batch = {"number": 0, "samples": [5], "files": [], "texts": []}
    for losses in ([None, 2.5], [2.5, None]):
        ranks = [line(4, rank, micro_batches=[batch | {"loss": losses[rank]}]) for rank in (0, 1)]
        rows = [row.split() for row in text_of(*ranks).splitlines()]
        assert ["0", "2.5", "5"] in rows, "of ranks with the same samples, one has the loss"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (
            {"where": "output", "micro_batch": 1, "module": "a.b", "class": "Linear"}
            | {"has_finite_weights": False},
            "of micro-batch 1: the output of a.b (Linear), whose weights are not finite",
        ),
        (
            {"where": "before", "micro_batch": 1, "module": "", "class": "Net", "before": "a"},
            "computed by the model (Net) before it calls a",
        ),
        ({"where": "inputs", "micro_batch": 0, "module": None}, "of micro-batch 0: the inputs of the model"),
        ({"where": "loss", "micro_batch": 0, "module": None}, "of micro-batch 0: the loss"),
        ({"where": "backward", "micro_batch": None, "module": "a"}, "the gradients of a; forward and loss"),
    ],
)
def test_the_place_of_the_first_nan_is_described(place: dict[str, Any], words: str) -> None:
    later = {"where": "backward", "micro_batch": None, "module": "z"}
    places = (place, later) if place["micro_batch"] is not None else (None, place)
    assert words in text_of(*(line(4, rank, non_finite=places[rank]) for rank in (0, 1)))


def test_differences_are_shown_exactly() -> None:
    recorded = {"samples": "0b", "loss": 1.25, "grad_norm": 2.0, "attempt": 1}
    text = text_of(line(4, 0, recorded=recorded), line(4, 1))
    assert "differs: other samples; loss 1.25 in the run, 1.5 here (by 2.0e-01)" in text
    assert "other samples" not in text_of(line(4, 0, recorded=recorded), line(4, 1), names=["loss"])
    assert "has no digest of this step" in text_of(line(4, 0, recorded=None), line(4, 1))
