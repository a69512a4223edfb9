"""Which nodes are excluded, for how long."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from hpc_train.recovery.bad_nodes import abort_line, excluded, exclusion_words, is_device_error
from hpc_train.run.attempts import AttemptRecord
from tests import aborts

pytestmark = pytest.mark.fault(14)

NOW = datetime(2026, 11, 21, 6, tzinfo=UTC)


def attempt(hours_ago: float, **nodes: str) -> AttemptRecord:
    end = (NOW - timedelta(hours=hours_ago)).isoformat(timespec="seconds")
    return AttemptRecord(1, end, [], None, end=end, bad_nodes=nodes)


def test_one_end_is_nobodys_fault() -> None:
    assert excluded([attempt(1, n1="died"), attempt(1, n2="died")], 24, NOW) == {}


def test_a_node_that_ended_two_attempts_is_left_out() -> None:
    records = [attempt(3, n1="died", n2="died"), attempt(2), attempt(1, n1="rank 3: Killed")]
    assert excluded(records, 24, NOW) == {"n1": "ended attempts twice: rank 3: Killed"}
    assert "3 times" in excluded([*records, attempt(0.5, n1="died")], 24, NOW)["n1"]


def test_a_failed_check_is_enough() -> None:
    how = "failed its check: no memory"
    assert excluded([attempt(1, n1=how)], 24, NOW) == {"n1": how}
    assert excluded([attempt(2, n1=how), attempt(1, n1="died")], 24, NOW) == {"n1": how}


def test_it_comes_back_after_its_time_and_goes_at_its_next_fault() -> None:
    records = [attempt(50, n1="died"), attempt(25, n1="died")]
    assert excluded(records, 24, NOW) == {}
    assert excluded(records, 26, NOW).keys() == {"n1"}
    assert excluded([*records, attempt(0, n1="died")], 24, NOW).keys() == {"n1"}


def test_zero_hours_exclude_nothing() -> None:
    assert excluded([attempt(0, n1="failed its check: x")], 0, NOW) == {}


@pytest.mark.parametrize("node", ["n1;id", "$(id)", "n[1-2]", "n1,n2", "", "-n1", "n1\n", "../x"])
def test_what_is_no_nodes_name_never_reaches_slurm(node: str) -> None:
    assert excluded([attempt(0, **{node: "failed its check: x"})], 24, NOW) == {}


def test_words() -> None:
    assert exclusion_words({"n2": "died", "n3": "hung"}) == "excludes n2 (died), n3 (hung)"
    assert exclusion_words({}) == ""


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("RuntimeError: CUDA error: unspecified launch failure", True),
        ("NCCL error: unhandled cuda error", True),
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("CUDA error: device-side assert triggered", False),
        ("NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.", True),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
        ("RuntimeError: CUDA error: invalid device ordinal", False),
        ("ValueError: maxid 3", False),
        ("committed xid 7 of the database", False),
        ("RuntimeError: CUDA error: GPU is lost", True),
        ("CUDA initialization: Error 802: system not yet initialized", True),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", True),
        ("Failed to initialize NVML: Driver/library version mismatch", True),
        ("CUDA error: misaligned address", False),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_errors_of_a_device_are_distinguished_from_a_programs(text: str, is_one: bool) -> None:
    assert is_device_error(f"Traceback\n  …\n{text}\n") is is_one


@pytest.mark.fault(51)
def test_the_message_of_an_abort_is_found_in_front_of_its_frames() -> None:
    said = f"step 3\n{aborts.DEVICE}"
    assert abort_line(said) == aborts.DEVICE_LINE
    assert abort_line(f"{aborts.TIMEOUT}{said}") == aborts.DEVICE_LINE, "the device's counts most"
    assert abort_line(aborts.TIMEOUT) == aborts.TIMEOUT_LINE
    assert abort_line(aborts.PEER) == aborts.PEER_LINE
    assert abort_line(f"{aborts.TIMEOUT}{aborts.PROGRAM}") == aborts.PROGRAM_LINE
    assert abort_line("step 3\nbye\n") is None
