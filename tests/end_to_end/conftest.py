"""What the tests of whole runs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.end_to_end.runs import end_what_is_left


@pytest.fixture(autouse=True)
def _nothing_is_left_running() -> Iterator[None]:
    yield
    end_what_is_left()
