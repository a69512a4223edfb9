"""Lines of CSV: harmless to a terminal and to a spreadsheet."""

from __future__ import annotations

import csv
import re
import unicodedata
from pathlib import Path

import pytest

import hpc_train
from hpc_train import console, errors
from hpc_train.console import csv_line
from hpc_train.errors import printable


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ('=HYPERLINK("http://x","y")', '"\'=HYPERLINK(""http://x"",""y"")"'),
        ("+1+1", "'+1+1"),
        ("-sum(A1)", "'-sum(A1)"),
        ("@sum", "'@sum"),
        ("\uff1d1", "'\uff1d1"),
        ("\t=1", "\\t=1"),
        ("\r=1", "\\r=1"),
        ("a\x1b]0;title\x07", "a\\x1b]0;title\\x07"),
        ("two\nlines", "two\\nlines"),
        ("-1.5e3", "-1.5e3"),
        ("+inf", "+inf"),
        (-1.5, "-1.5"),
        (None, ""),
        ("a-b, c=d", '"a-b, c=d"'),
    ],
)
def test_a_cell_is_neither_a_formula_nor_an_escape_sequence(cell: object, line: str) -> None:
    assert csv_line([cell, 1]) == f"{line},1\n"


def test_csv_is_written_by_one_function() -> None:
    package = Path(hpc_train.__file__).parent
    writers = re.compile(r"csv\.(Dict)?[wW]riter|to_csv")
    users = [path.name for path in sorted(package.rglob("*.py")) if writers.search(path.read_text())]
    # `init` writes lists of images, which are read back as they are.
    assert sorted(users) == ["console.py", "init.py"]


def test_a_line_is_read_back() -> None:
    assert next(csv.reader([csv_line(["a,b", 'c"d', 0.5])])) == ["a,b", 'c"d', "0.5"]


#: Would clear the screen, forge a line, and show text from right to left.
HOSTILE = "a\x1b[2J\nforged: OK\u202e\rb"
SHOWN = "a\\x1b[2J\\nforged: OK\\u202e\\rb"


def test_text_neither_controls_the_terminal_nor_forges_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    console.say(HOSTILE, "second")
    console.put(HOSTILE, "second")
    assert capsys.readouterr() == (f"{SHOWN}\nsecond\n", f"{SHOWN}\nsecond\n")
    assert console.columns([[HOSTILE, "b"], ["c", "d"]])[0] == f"{SHOWN}  b"
    console.say_text(f"first\n{HOSTILE}")
    assert capsys.readouterr().err == "first\na\\x1b[2J\nforged: OK\\u202e\\rb\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("step 5\tloss 0.1\n", "step 5\tloss 0.1\n"),
        ("größe 寸", "größe 寸"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("a\u202eb\rc\x7f", "a\\u202eb\\rc\\x7f"),
        ("\udc80", "\\udc80"),
    ],
)
def test_what_acts_on_a_terminal_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_large_log_is_not_looked_up_character_by_character(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[str] = []
    really = unicodedata.category
    monkeypatch.setattr(unicodedata, "category", lambda char: looked_up.append(char) or really(char))
    errors._shown.cache_clear()
    printable("step 5 loss 0.1 größe\x1b\n" * 1000)
    assert sorted(looked_up) == ["\x1b", "ß", "ö"]
