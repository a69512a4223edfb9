"""Who made the attempt hang, from what all ranks say of themselves."""

from __future__ import annotations

from typing import Any

from hpc_train.health.hang import Report, Verdict, judge, store_is_silent
from hpc_train.run.processes import Process

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


def test_one_that_never_said_anything_is_named_without_its_node() -> None:
    found = verdict(report(0), report(1))
    assert (found.guilty, found.node) == (2, None)
    assert "rank 2 does not answer and never did" in found.text


def test_the_rank_furthest_behind_is_named() -> None:
    found = verdict(report(0), report(1, count=59, step=56), report(2, collectives={"0": 1, "1": 1}))
    assert (found.guilty, found.node) == (1, "n2")
    assert "in step 56 (training) while rank 0 has reached step 57 (training)" in found.text


def test_among_equals_the_one_that_has_not_begun_what_the_others_wait_for_is_named() -> None:
    found = verdict(report(0), report(1), report(2, collectives={"0": 99, "1": 50}, seen={2: "D"}))
    assert found.guilty == 2
    assert "others wait for it in a collective operation that it has not started" in found.text
    assert "can't be interrupted" in found.text


def test_groups_that_not_all_ranks_are_in_say_nothing() -> None:
    found = verdict(
        report(0, collectives={"0": 7, "a": 5}),
        report(1, collectives={"0": 7, "b": 9}),
        report(2, collectives={"0": 7}),
    )
    assert found.guilty is None


def test_the_rank_whose_data_do_not_come_is_named() -> None:
    """Its peers keep asking it meanwhile, and so are never at the same number."""
    found = verdict(
        report(0, collectives={"0": 7}), report(1, note="waiting for data"), report(2, collectives={"0": 3})
    )
    assert found.guilty == 1
    assert "in step 57 (training, waiting for data) while others have what they need" in found.text


def test_where_all_ranks_are_equally_far_nobody_is_named() -> None:
    found = verdict(report(0), report(1), report(2))
    assert (found.guilty, found.node, found.speaker) == (None, None, 0)
    assert "all 3 ranks are in step 57 (training) for 300 s" in found.text
    assert "look at the network" in found.text


def test_where_nobody_has_data_the_disk_is_to_be_looked_at() -> None:
    found = verdict(*(report(rank, note="waiting for data") for rank in range(3)))
    assert found.guilty is None
    assert "look at the disk" in found.text


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


def test_nobody_is_behind_in_collectives_that_are_not_counted() -> None:
    """ProcessGroupNCCL2 has no sequence numbers: its entries are missing, on some ranks or on all."""
    cpu = {"0 cpu": 4}
    found = verdict(
        report(0, collectives=cpu | {"0 cuda": 100}), report(1, collectives=cpu | {"0 cuda": 7}),
        report(2, collectives=cpu),
    )  # fmt: skip
    assert found.guilty is None
