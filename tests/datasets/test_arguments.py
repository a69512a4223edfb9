"""Mistakes in ``data.args`` read like those in the keys of the file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.fields import PlainName, PositiveInt, Section
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.training.datasets.base import parse_args


class Args(Section):
    """Arguments of each kind."""

    num_classes: PositiveInt
    """Required."""
    size: PositiveInt | None = None
    """A union with null."""
    columns: str | list[str] = "target"
    """A union of lists and text."""
    words: list[str] = []
    """A list."""
    code: Annotated[str, Field(pattern="^[a-z]{3}$")] = "abc"
    """A pattern that nothing describes."""
    kind: Literal["class", "number"] = "class"
    """One of some words."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """A number."""
    name: PlainName = "x"
    """Text of a form."""


def mistakes(args: dict[str, Any]) -> list[str]:
    with pytest.raises(BadFileError) as caught:
        parse_args(Args, DataConfig(name="acme:data", args=args))
    return [line.removeprefix("data.args.") for line in caught.value.problems]


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({}, "num_classes: is missing; write num_classes: a whole number of at least 1"),
        # A misspelt argument is not reported as missing too.
        ({"num_class": 3}, "num_class: acme:data takes no argument 'num_class'; did you mean 'num_classes'?"),
        (
            {"num_classes": "3"},
            "num_classes: needs a whole number of at least 1, got the text '3'; write 3 without quotes",
        ),
        ({"num_classes": 3.0}, "num_classes: needs a whole number of at least 1, got 3.0; write 3"),
        ({"size": 0}, "size: needs a whole number of at least 1, got 0; write a number like 1"),
        ({"columns": 5}, "columns: needs text or a list, got 5; write text of this form"),
        ({"words": ["a", 5]}, "words[1]: needs text, got 5; put it in quotes: '5'"),
        ({"kind": "clas"}, "kind: needs one of class, number, got the text 'clas'; did you mean class?"),
        ({"fraction": 2}, "fraction: needs a number above 0 and at most 1, got 2; write a number like 0.5"),
        (
            {"code": "ab"},
            "code: needs text that matches ^[a-z]{3}$, got the text 'ab'; write text of this form",
        ),
        ({"name": 5}, "name: needs 1 to 64 lower-case letters"),
        ({"fractoin": 0.1}, "fractoin: acme:data takes no argument 'fractoin'; did you mean 'fraction'?"),
        (
            {"xyz": 1},
            (
                "xyz: acme:data takes no argument 'xyz'; take it out; "
                f"acme:data takes {', '.join(sorted(Args.model_fields))}"
            ),
        ),
    ],
)
def test_a_wrong_argument_is_explained_like_a_key_of_the_file(args: dict[str, Any], problem: str) -> None:
    (found,) = mistakes(args if args.keys() <= {"num_class"} else {"num_classes": 3, **args})
    assert found == problem or ("name" in args and found.startswith(problem) and found.endswith("this form"))
