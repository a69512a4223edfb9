"""What is wrong with a file, in words that say what to write instead."""

from __future__ import annotations

import pytest

from hpc_train.config.problems import Problem, unknown_argument


@pytest.mark.parametrize(
    ("known", "remedy"),
    [
        (["nesterov", "momentum"], "did you mean 'nesterov'?"),
        (["eps", "betas"], "it takes eps, betas"),
        ([], "it takes none"),
    ],
)
def test_an_unknown_argument_is_named_with_what_could_be_meant(known: list[str], remedy: str) -> None:
    found = unknown_argument(("optimization", "optimizer", "args"), "sgd", "nestrov", known)
    path = ("optimization", "optimizer", "args")
    assert found == Problem(path, "sgd takes no argument 'nestrov'", remedy)
