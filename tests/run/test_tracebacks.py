"""The screen shows where the user's own code failed; the log has the whole traceback."""

from __future__ import annotations

from pathlib import Path

from hpc_train import __file__ as package_file
from hpc_train.run.tracebacks import MAX_LINES, shortened_traceback, users_traceback

LOG = Path("runs/x/1/attempts/1/rank-0.log")
BEGIN = "Traceback (most recent call last):"


def frame(file: str, line: int = 3) -> str:
    return f'  File "{file}", line {line}, in forward\n    return call(x)\n           ^^^^^^^'


def torch_frames(number: int) -> list[str]:
    return [frame("/env/lib/python3.11/site-packages/torch/nn/modules/module.py", n) for n in range(number)]


def lines_of(*parts: str) -> list[str]:
    shown = shortened_traceback("\n".join(parts), LOG).splitlines()
    assert len(shown) <= MAX_LINES
    return shown


def test_frames_of_the_users_code_come_first_and_the_rest_stays_in_the_log() -> None:
    ours = frame(str(Path(package_file).parent / "training/loop.py"))
    copied = frame("/runs/x/.code/ab12/package/hpc_train/training/forward.py")
    user = frame("/runs/x/.code/ab12/tree/models/net.py", 41)
    assert lines_of(BEGIN, ours, copied, *torch_frames(9), user, *torch_frames(3), "ValueError: bad") == [
        "Traceback of your code (most recent call last):",
        '  File "models/net.py", line 41, in forward',
        "    return call(x)",
        "ValueError: bad",
        f"the rest is in {LOG}",
    ]


def test_the_users_frames_are_found_in_the_cause_of_an_error_too() -> None:
    first = [BEGIN, frame("/home/ada/net.py", 7), "KeyError: 'x'"]
    second = ["", "The above exception was the direct cause of the following exception:", ""]
    shown = lines_of(*first, *second, BEGIN, *torch_frames(9), "RuntimeError: failed")
    assert shown[1].startswith('  File "/home/ada/net.py", line 7') and "RuntimeError: failed" in shown


def test_without_a_frame_of_the_user_the_innermost_frames_are_shown() -> None:
    shown = lines_of(BEGIN, *torch_frames(20), "RuntimeError: " + "\n".join("abcdefgh"))
    assert shown[0] == BEGIN and "line 19" in shown[7] and shown[-2] == "…"


def test_a_short_traceback_and_other_text_stay_as_they_are() -> None:
    short = "\n".join([BEGIN, *torch_frames(2), "ValueError: bad"])
    assert shortened_traceback(short, LOG) == short
    assert len(lines_of(*map(str, range(99)))) == MAX_LINES


def test_a_recursion_does_not_hide_the_message() -> None:
    user = frame("/home/ada/net.py", 7)
    repeated = "  [Previous line repeated 18 more times]"
    shown = lines_of(BEGIN, *torch_frames(9), user, repeated, frame("/home/ada/net.py", 8), "KeyError: 'x'")
    assert [shown[1][-13:], shown[3][-13:], shown[5]] == ["7, in forward", "8, in forward", "KeyError: 'x'"]


def test_an_error_without_a_frame_of_the_user_is_not_the_users() -> None:
    assert users_traceback(FileNotFoundError("no network")) is None
    try:
        {}["x"]  # in a file of the user's, as this one is
    except KeyError as error:
        assert (users_traceback(error) or "").endswith("KeyError: 'x'")
