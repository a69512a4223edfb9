from __future__ import annotations

import unicodedata

import pytest

from hpc_train import errors
from hpc_train.errors import printable


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
