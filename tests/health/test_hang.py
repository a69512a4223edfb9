"""Who made the attempt hang, from what all ranks say of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_train.run.processes import Process
from hpc_train.training.health.hang import Report, Verdict, judge, store_is_silent

STACKS = "attempts/3/rank-*.stacks"
WORDS = "NCCL can't connect over its interface eth0; profile: network_interface (NCCL_SOCKET_IFNAME)"


def report(rank: int, **facts: Any) -> Report:
    usual = {
        "node": f"n{rank + 1}", "node_index": rank, "process": None, "count": 60, "phase": "training",
        "step": 57, "note": None, "age_s": 300.0, "tick": 9, "collectives": {"0": 100, "1": 50},
    }  # fmt: skip
    return Report(rank, **usual | facts)


def verdict(*answers: Report, last: tuple[Report, ...] = (), world_size: int = 3) -> Verdict:
    return judge(
        world_size, {each.rank: each for each in answers}, {each.rank: each for each in last}, STACKS, WORDS
    )


def test_one_that_does_not_answer_is_named_before_all_others() -> None:
    found = verdict(report(0, count=1), report(1, seen={2: "T"}), last=(report(2, count=90),))
    assert (found.guilty, found.node, found.speaker) == (2, "n3", 2)
    assert (found.answered, found.silent) == ([0, 1], [2])
    assert found.text == (
        "HangError: rank 2 on n3 made no progress for 300 s in step 57 (training) and does not answer; "
        f"its process is stopped (SIGSTOP); stacks in {STACKS}"
    )


def test_a_node_whose_ranks_are_all_silent_is_named() -> None:
    found = verdict(report(0), last=(report(1, node="n2"), report(2, node="n2")))
    assert (found.guilty, found.silent) == (1, [1, 2])
    assert "nor does any other rank on n2, which may be down or disconnected; nor do ranks 2" in found.text


_CPU = {"0 cpu": 4}


@pytest.mark.parametrize(
    ("facts", "guilty", "text"),
    [
        ([{}, {}], 2, "rank 2 does not answer and never did"),
        (
            [{}, {"count": 59, "step": 56}, {"collectives": {"0": 1, "1": 1}}],
            1,
            "in step 56 (training) while rank 0 has reached step 57 (training)",
        ),
        # Among equals, the rank that has not started the collective that the others wait for.
        (
            [{}, {}, {"collectives": {"0": 99, "1": 50}, "seen": {2: "D"}}],
            2,
            "others wait for it in a collective operation that it has not started",
        ),
        ([{}, {}, {"collectives": {"0": 99, "1": 50}, "seen": {2: "D"}}], 2, "can't be interrupted"),
        # Groups that do not contain all ranks do not count.
        (
            [{"collectives": {"0": 7, "a": 5}}, {"collectives": {"0": 7, "b": 9}}, {"collectives": {"0": 7}}],
            None,
            "",
        ),
        # Peers keep asking a rank that waits for data, so their numbers differ.
        (
            [{"collectives": {"0": 7}}, {"note": "waiting for data"}, {"collectives": {"0": 3}}],
            1,
            "in step 57 (training, waiting for data) while others have what they need",
        ),
        ([{}, {}, {}], None, "all 3 ranks are in step 57 (training) for 300 s"),
        ([{}, {}, {}], None, "look at the network"),
        ([{"note": "waiting for data"}] * 3, None, "look at the disk"),
        # ProcessGroupNCCL2 has no sequence numbers: its entries are missing, on some ranks or on all.
        (
            [
                {"collectives": _CPU | {"0 cuda": 100}},
                {"collectives": _CPU | {"0 cuda": 7}},
                {"collectives": _CPU},
            ],
            None,
            "",
        ),
    ],
)
def test_the_rank_that_made_others_hang(facts: list[dict[str, Any]], guilty: int | None, text: str) -> None:
    judged = verdict(*(report(rank, **changes) for rank, changes in enumerate(facts)))
    has_answered = guilty is not None and guilty < len(facts)
    assert (judged.guilty, judged.node) == (guilty, f"n{(guilty or 0) + 1}" if has_answered else None)
    assert text in judged.text
    assert guilty is not None or judged.speaker == 0


def test_one_rank_alone_is_behind_by_itself() -> None:
    found = verdict(report(0), world_size=1)
    assert found.guilty == 0
    assert found.text == (
        f"HangError: rank 0 on n1 made no progress for 300 s in step 57 (training); stacks in {STACKS}"
    )


def test_a_silent_store_is_rank_0s() -> None:
    found = store_is_silent(report(2), report(0), None, STACKS)
    assert (found.guilty, found.node, found.answered) == (0, "n1", [2])
    assert "rank 0 on n1 does not answer, nor does the store that it runs; rank 2 made no" in found.text
    unknown = store_is_silent(report(2), None, "T", STACKS)
    assert "rank 0 does not answer, nor does the store that it runs; its process is stopped" in unknown.text


def test_reports_and_verdicts_survive_the_way_through_the_store() -> None:
    own = report(1, process=Process.current(), seen={1: "R", 2: "T"}, note="waiting for data")
    assert Report.from_text(own.to_text()) == own
    found = verdict(own)
    assert Verdict.from_text(found.to_text().encode()) == found


def test_ranks_that_can_not_connect_name_the_interface() -> None:
    found = verdict(*(report(rank, phase="connecting devices", step=None) for rank in range(3)))
    assert (found.guilty, found.node) == (None, None)
    assert found.text == (
        f"HangError: all 3 ranks are in connecting devices for 300 s and none is behind the others; {WORDS}; "
        f"stacks in {STACKS}"
    )
    late = verdict(report(0, phase="connecting"), report(1, phase="connecting", count=59), report(2))
    assert late.guilty == 1 and WORDS in late.text
    assert WORDS not in verdict(report(0), report(1), report(2)).text
