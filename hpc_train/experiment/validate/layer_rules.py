"""Requirements on the model of strategies that share layers: read from ``gpt``'s arguments,
reported by a child process (``names``) for models of timm and torchvision. Otherwise the ranks find out
when they split them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from hpc_train.errors import shortened
from hpc_train.experiment.config.problems import KeyPath, Problem
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.topology.degrees import Degrees, divisors, find_degrees, stages_per_rank
from hpc_train.experiment.topology.strategy_traits import traits_of
from hpc_train.experiment.validate import model_facts
from hpc_train.experiment.validate.base import rule
from hpc_train.experiment.validate.model_rules import GPTArgs, default_hidden_dim


class LayerFacts(BaseModel):
    """The properties of a model that matter when ranks share its layers."""

    #: Name of a quantity that the tensor degree must divide → its number; empty: no layer can be shared.
    shared: dict[str, int]
    #: The key of the attention dropout, which ranks that share heads don't support.
    dropout_key: str | None
    #: The maximum number of stages.
    most_stages: int


@dataclass(frozen=True)
class _Misfit:
    """A degree that does not fit the model, with the degrees that do; or a property that no degree fits."""

    path: KeyPath
    message: str
    possible: list[int] = field(default_factory=list)
    otherwise: str = "write another parallel.strategy, like fsdp"

    def problem(self) -> Problem:
        """Return the problem if any number of ranks may be started."""
        remedy = f"write {_either(self.possible)}" if self.possible else self.otherwise
        return Problem(self.path, self.message, remedy, code="parallel.layers")


@rule("parallel.gpt-layers", "model.name", "model.args", "parallel")
def gpt_can_be_shared_out(experiment: Experiment) -> Iterator[Problem]:
    """The degrees must divide the heads, widths and blocks of ``gpt``."""
    if experiment.model.name == "gpt":
        yield from _problems_of_the_file(experiment)


@rule("parallel.layers", "model.name", "model.args", "parallel", looks_up_names=True)
def other_models_can_be_shared_out(experiment: Experiment) -> Iterator[Problem]:
    """The degrees must fit the layers of timm's and torchvision's models."""
    if experiment.model.name != "gpt":
        yield from _problems_of_the_file(experiment)


def _problems_of_the_file(experiment: Experiment) -> Iterator[Problem]:
    """Check the degrees given in the file; the others follow from the number of ranks."""
    parallel = experiment.parallel
    if not traits_of(parallel.strategy).is_model_parallel:
        return
    degrees = Degrees(pipeline=parallel.pipeline or 1, tensor=parallel.tensor or 1)
    for misfit in _misfits(experiment, degrees):
        yield misfit.problem()


def problems_of_layers(experiment: Experiment, degrees: Degrees, ranks_per_node: int) -> list[Problem]:
    """Return why ranks of these degrees can't share the model, with degrees that work for as many ranks."""

    def fits(path: KeyPath, size: int) -> bool:
        changed = experiment.parallel.model_copy(update={str(path[-1]): size})
        changed_degrees = find_degrees(changed, degrees.world_size, ranks_per_node)
        return isinstance(changed_degrees, Degrees) and not any(_misfits(experiment, changed_degrees))

    problems = []
    for misfit in _misfits(experiment, degrees):
        remedy = misfit.otherwise
        if fitting := [size for size in misfit.possible if fits(misfit.path, size)]:
            remedy = f"write {_either(fitting)}"
        elif misfit.possible:
            remedy = f"start a number of ranks that {_either(misfit.possible)} divides"
        problems.append(Problem(misfit.path, misfit.message, remedy, code="parallel.layers"))
    return problems


def _either(sizes: list[int]) -> str:
    *first, last = map(str, sizes[-3:])
    return f"{', '.join(first)} or {last}" if first else last


def _misfits(experiment: Experiment, degrees: Degrees) -> Iterator[_Misfit]:
    if degrees.tensor == degrees.pipeline == 1:
        return
    facts = layer_facts(experiment.model.name, experiment.model.args)
    if facts is None:
        return
    if degrees.tensor > 1:
        yield from _misfits_of_tensor(experiment, facts, degrees.tensor)
    stages_of_rank = stages_per_rank(experiment.parallel)
    if (stages := degrees.pipeline * stages_of_rank) > facts.most_stages and degrees.pipeline > 1:
        name, most = shortened(experiment.model.name), facts.most_stages
        message = f"{stages} stages need a block each, and {name} can be cut into {most}"
        possible = [*range(2, most // stages_of_rank + 1)]
        if not possible and degrees.pipeline <= most:
            otherwise = "write 1f1b, which has one stage per rank"
            yield _Misfit(("parallel", "schedule"), message, otherwise=otherwise)
        else:
            yield _Misfit(("parallel", "pipeline"), message, possible)


def _misfits_of_tensor(experiment: Experiment, facts: LayerFacts, ranks: int) -> Iterator[_Misfit]:
    if not facts.shared:
        message = f"{shortened(experiment.model.name)} has no layers that ranks can share"
        if not traits_of(experiment.parallel.strategy).has_stages:
            yield _Misfit(("parallel", "strategy"), message)
        else:
            yield _Misfit(("parallel", "tensor"), message, otherwise="take it out")
    if facts.dropout_key is not None:
        yield _dropping(facts.dropout_key, ranks)
    if uneven := _uneven(facts.shared, ranks):
        yield uneven


def _dropping(key: str, ranks: int) -> _Misfit:
    message = f"{ranks} ranks that share heads can't drop the weights of attention"
    return _Misfit(tuple(key.split(".")), message, otherwise="write 0, or parallel.strategy: fsdp")


def _uneven(shared: Mapping[str, int], ranks: int) -> _Misfit | None:
    for what, number in shared.items():
        if number % ranks:
            message = f"{ranks} ranks can't share {number} {what} evenly"
            return _Misfit(("parallel", "tensor"), message, divisors(math.gcd(*shared.values()))[1:])
    return None


def dropped_attention(key: str, ranks: int) -> Problem:
    """Return the problem with attention dropout, set by ``key``, if ranks share heads."""
    return _dropping(key, ranks).problem()


def uneven_share(shared: Mapping[str, int], ranks: int) -> Problem | None:
    """Return the problem if ``ranks`` does not divide a number of ``shared`` (name → number)."""
    misfit = _uneven(shared, ranks)
    return None if misfit is None else misfit.problem()


def layer_facts(name: str, args: dict[str, Any]) -> LayerFacts | None:
    """Return the layers of a model that ranks can share; None if unknown."""
    try:
        if name == "gpt":
            return _facts_of_gpt(GPTArgs.model_validate(args))
        return LayerFacts.model_validate(model_facts.facts(name, args))
    except ValidationError:
        return None


def _facts_of_gpt(args: GPTArgs) -> LayerFacts:
    shared = {"heads of gpt": args.num_heads}
    if args.style == "llama":
        shared["key and value heads of gpt"] = args.num_kv_heads or args.num_heads
        shared["columns of the MLP of gpt"] = args.hidden_dim or default_hidden_dim(args.dim)
    dropout_key = "model.args.dropout" if args.dropout else None
    return LayerFacts(shared=shared, dropout_key=dropout_key, most_stages=args.num_layers)
