"""What ranks that share layers ask of the model, as far as the file says it: of ``gpt``, heads and blocks.

Of other models the ranks find out when they share it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hpc_train.config.degrees import SHARING_LAYERS, Degrees, divisors, find_degrees
from hpc_train.config.pipelines import stages_per_rank
from hpc_train.config.problems import KeyPath, Problem, Rule, rule
from hpc_train.config.schema import Experiment

#: ``model.args`` of gpt that may be absent. A test compares.
GPT_DEFAULTS = {"num_heads": 4, "num_layers": 4}


@dataclass(frozen=True)
class _Misfit:
    """A degree that gpt can't be shared by, and those that it can; or what of it can't be shared at all."""

    path: KeyPath
    message: str
    possible: list[int] = field(default_factory=list)
    otherwise: str = "write another parallel.strategy, like fsdp"


@rule("model.name", "model.args", "parallel")
def gpt_can_be_shared_out(experiment: Experiment) -> Iterator[Problem]:
    """Judge the degrees that the file says; the others follow from the number of ranks."""
    parallel = experiment.parallel
    if parallel.strategy not in SHARING_LAYERS:
        return
    degrees = Degrees(pipeline=parallel.pipeline or 1, tensor=parallel.tensor or 1)
    for misfit in _misfits_of_gpt(experiment, degrees):
        remedy = f"write {_either(misfit.possible)}" if misfit.possible else misfit.otherwise
        yield Problem(misfit.path, misfit.message, remedy)


def problems_of_layers(experiment: Experiment, degrees: Degrees, ranks_per_node: int) -> list[Problem]:
    """Return why ranks of these degrees can't share the model, with degrees that fit as many ranks."""

    def fits(path: KeyPath, size: int) -> bool:
        changed = experiment.parallel.model_copy(update={str(path[-1]): size})
        found = find_degrees(changed, degrees.world_size, ranks_per_node)
        return isinstance(found, Degrees) and not any(_misfits_of_gpt(experiment, found))

    problems = []
    for misfit in _misfits_of_gpt(experiment, degrees):
        remedy = misfit.otherwise
        if fitting := [size for size in misfit.possible if fits(misfit.path, size)]:
            remedy = f"write {_either(fitting)}"
        elif misfit.possible:
            remedy = f"start a number of ranks that {_either(misfit.possible)} divides"
        problems.append(Problem(misfit.path, misfit.message, remedy))
    return problems


def _either(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes[-3:]))


def _misfits_of_gpt(experiment: Experiment, degrees: Degrees) -> Iterator[_Misfit]:
    if experiment.model.name != "gpt":
        return
    args = experiment.model.args
    heads, layers = (_argument(args, name) for name in ("num_heads", "num_layers"))
    if degrees.tensor > 1 and args.get("dropout"):
        message = f"{degrees.tensor} ranks that share heads can't drop the weights of attention"
        path = ("model", "args", "dropout")
        yield _Misfit(path, message, otherwise="write 0, or parallel.strategy: fsdp")
    if degrees.tensor > 1 and heads % degrees.tensor:
        message = f"{degrees.tensor} ranks can't share {heads} heads of gpt evenly"
        yield _Misfit(("parallel", "tensor"), message, divisors(heads)[1:])
    each = stages_per_rank(experiment.parallel)
    if (stages := degrees.pipeline * each) > layers and degrees.pipeline > 1:
        message = f"{stages} stages need a block each, and gpt has {layers}"
        yield _Misfit(("parallel", "pipeline"), message, [*range(2, layers // each + 1)])


def _argument(args: dict[str, Any], name: str) -> int:
    """Return what the file says; the default where that is no such number, which the ranks refuse."""
    value = args.get(name)
    return value if type(value) is int and value > 0 else GPT_DEFAULTS[name]


RULES: tuple[Rule, ...] = (gpt_can_be_shared_out,)
