"""The arguments of a part, such as ``data.args``: a mapping whose keys are the part's own."""

from __future__ import annotations

from pydantic import ValidationError

from hpc_train.config.explanations import explain_arguments
from hpc_train.config.fields import Arguments, Section
from hpc_train.config.problems import KeyPath, Problem


def args_problems(path: KeyPath, owner: str, section: type[Section], args: Arguments) -> list[Problem]:
    """Return what is wrong with the arguments under ``path`` of the part called ``owner``, one for a key."""
    try:
        section.model_validate(args)
    except ValidationError as error:
        return explain_arguments(error, section, path, args, owner)
    return []
