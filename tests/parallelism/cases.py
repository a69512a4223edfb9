"""Which settings are trained together and compared with plain PyTorch: all pairs that the table allows.

Without torch. A case is one choice of each factor. Under every strategy the cases hold each pair of choices
that ``validate.compatibility`` allows together, so that a feature meets each other one under each
strategy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import Any

from hpc_train.experiment.config.keys import replaced, split_key
from hpc_train.experiment.config.marked_yaml import read_value
from hpc_train.experiment.config.problems import KeyPath, Problem
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.topology.degrees import Degrees, find_degrees
from hpc_train.experiment.topology.strategy_traits import BUILT_IN
from hpc_train.experiment.validate import rules

STRATEGIES = tuple(BUILT_IN)
MODEL_PARALLEL = tuple(name for name, traits in BUILT_IN.items() if traits.is_model_parallel)
SHARDED = tuple(name for name, traits in BUILT_IN.items() if traits.shards_parameters)
STEPS = 20
MICRO_BATCH_SIZE = 4

#: Two models, as a file names them: a transformer, and convolutions with BatchNorm.
VIT = (
    "model={name: timm/test_vit, args: {img_size: 16, patch_size: 8, embed_dim: 16, depth: 4, num_heads: 2}}"
)
#: Not smaller in its last stages: BatchNorm of four values whose spread is near zero would amplify rounding.
RESNET = "model={name: timm/test_resnet, args: {output_stride: 8}}"
#: Rates and an eps at which training does not amplify rounding either.
SGD = "optimization.optimizer={name: sgd, lr: 0.002, momentum: 0.9, weight_decay: 0.01}"
ADAMW = "optimization.optimizer={name: adamw, lr: 0.0002, weight_decay: 0.01, args: {eps: 1.0e-3}}"

_FILE: dict[str, Any] = {
    "name": "parallelism",
    "task": "classification",
    "seed": 5,
    "data": {"name": "digits"},
    "optimization": {"steps": STEPS, "schedule": {"name": "cosine"}},
}  # fmt: skip


@dataclass(frozen=True)
class Feature:
    """One setting, as overrides of a file: a row of the docs' table."""

    title: str
    overrides: tuple[str, ...]
    #: Whether it runs on a CPU within seconds; otherwise it is left to ``make test-gpu``.
    on_cpu: bool = True


#: Settings that can be combined freely, unless a rule refuses it.
FEATURES = (
    Feature("fp32", ("precision=fp32",)),
    Feature("tf32", ("precision=tf32",)),
    Feature("bf16", ("precision=bf16",)),
    Feature("fp16 with a scaler", ("precision=fp16",)),
    Feature("fp8", ("precision=fp8",), on_cpu=False),
    Feature("fp64", ("precision=fp64",)),
    Feature("gradient clipping", ("optimization.clip_grad_norm=1.0",)),
    Feature("channels_last", ("model.channels_last=true",)),
    Feature("SyncBN", ("parallel.sync_batchnorm=true",)),
    Feature("EMA", ("optimization.ema={decay: 0.9}",)),
    Feature("layer-wise lr decay", ("optimization.optimizer.layer_decay=0.8",)),
    Feature("compile, by block", ("compile=true",)),
    Feature("compile, whole", ("compile={scope: model}",)),
    Feature("compile, reduce-overhead", ("compile={mode: reduce-overhead}",)),
    Feature("compile, max-autotune", ("compile={mode: max-autotune}",), on_cpu=False),
    Feature("compile, with fallback", ("compile={fallback: true}",)),
    Feature("activation checkpointing, all blocks", ("activation_checkpointing=blocks",)),
    Feature("activation checkpointing, every 2nd block", ("activation_checkpointing=every 2",)),
    Feature("activation checkpointing, selective", ("activation_checkpointing=selective",)),
)


@dataclass(frozen=True)
class Choice:
    """One value of a factor: overrides of a file, and what the docs' table calls it (empty: nothing)."""

    factor: str
    overrides: tuple[str, ...]
    title: str = ""
    on_cpu: bool = True


@dataclass(frozen=True)
class Shape:
    """How many ranks share how many micro-batches."""

    ranks: int
    micro_batches: int

    @property
    def title(self) -> str:
        return f"{self.ranks} ranks, {self.micro_batches} micro-batches"


#: One micro-batch a rank, two, and three ranks that share four, so that two have a spare slot.
SHAPES = (Shape(2, 2), Shape(2, 4), Shape(3, 4), Shape(4, 4), Shape(4, 8))

#: Strategy → number of ranks and micro-batches → keys of ``parallel``; where there is none, as the strategy
#: has it. Ranks that share layers do so in each product of degrees.
_PARALLEL: dict[str, dict[Shape, tuple[str, ...]]] = {
    "hsdp": {Shape(4, 4): ("replicate=2",), Shape(4, 8): ("replicate=2",)},
    "tensor": {Shape(4, 4): ("tensor=2", "replicate=2"), Shape(4, 8): ("tensor=2", "shard=2")},
    "pipeline": {
        Shape(2, 4): ("schedule=gpipe",),
        Shape(4, 4): ("pipeline=2", "tensor=2", "schedule=1f1b"),
        Shape(4, 8): ("pipeline=2", "shard=2", "schedule=interleaved"),
    },
    "split": {Shape(4, 4): ("pipeline=2", "replicate=2"), Shape(4, 8): ("pipeline=2", "shard=2")},
}


@dataclass(frozen=True)
class Case:
    """One training: everything that ``ranks`` ranks receive."""

    strategy: str
    shape: Shape
    choices: tuple[Choice, ...]

    @property
    def overrides(self) -> tuple[str, ...]:
        own = tuple(override for choice in self.choices for override in choice.overrides)
        return (*_of_strategy(self.strategy, self.shape), *own)

    @property
    def titles(self) -> tuple[str, ...]:
        return tuple(choice.title for choice in self.choices if choice.title)

    @property
    def experiment(self) -> Experiment:
        return experiment_of(self.overrides)

    @property
    def data_ranks(self) -> int:
        degrees = find_degrees(self.experiment.parallel, self.shape.ranks, self.shape.ranks)
        assert isinstance(degrees, Degrees), degrees
        return degrees.data_ranks

    @property
    def is_compiled(self) -> bool:
        return any(choice.factor == "compile" and choice.overrides for choice in self.choices)

    @property
    def model(self) -> str:
        return next(choice.overrides[0] for choice in self.choices if choice.factor == "model")

    def __str__(self) -> str:
        model = "vit" if self.model == VIT else "resnet"
        optimizer = "sgd" if any(SGD in choice.overrides for choice in self.choices) else "adamw"
        return ", ".join((self.strategy, self.shape.title, model, optimizer, *self.titles))


def _of_strategy(strategy: str, shape: Shape) -> tuple[str, ...]:
    batch = shape.micro_batches * MICRO_BATCH_SIZE
    sizes = (f"optimization.global_batch_size={batch}", f"optimization.micro_batch_size={MICRO_BATCH_SIZE}")
    own = _PARALLEL.get(strategy, {}).get(shape, ())
    return (f"parallel.strategy={strategy}", *(f"parallel.{key}" for key in own), *sizes)


def experiment_of(overrides: Sequence[str]) -> Experiment:
    """Return the file with these changes."""
    data = _FILE
    for override in overrides:
        data = replaced(data, *_read(override))
    return Experiment.model_validate(data)


@cache
def _read(override: str) -> tuple[KeyPath, Any]:
    key, _, text = override.partition("=")
    return split_key(key), read_value(text)[0]


def problems_of(case: Case) -> list[Problem]:
    """Return why a file can't say this, or why its ranks can't start it or share the model's layers."""
    experiment = case.experiment
    ranks = case.shape.ranks
    return [*rules.check(experiment), *rules.check_start(experiment, ranks, ranks)]


def factors(features: Sequence[Feature] = FEATURES) -> dict[str, list[Choice]]:
    """Return factor → its choices: features that set the same key exclude each other."""
    found: dict[str, list[Choice]] = {
        "model": [Choice("model", (VIT,)), Choice("model", (RESNET,))],
        "optimizer": [Choice("optimizer", (SGD,)), Choice("optimizer", (ADAMW,))],
    }
    for feature in features:
        key = feature.overrides[0].partition("=")[0].removesuffix(".enabled")
        found.setdefault(key, [] if key == "precision" else [Choice(key, ())])
        found[key].append(Choice(key, feature.overrides, feature.title, feature.on_cpu))
    return found


def allowed_cases(strategy: str) -> list[Case]:
    """Return cases that hold every allowed pair of what a CPU has under this strategy; always the same.

    In fp64, where weights, gradients and EMA are compared, each two features are combined once more, and
    each on 2 and on 4 ranks.
    """
    draw = random.Random(strategy)
    choices = factors([feature for feature in FEATURES if feature.on_cpu])
    pairs = [
        pair
        for one, other in combinations(_columns(choices), 2)
        for pair in product(one, other)
        if _is_allowed(strategy, pair)
    ]
    cases = _covering(strategy, pairs, (), choices, draw)
    (fp64,) = [choice for choice in choices["precision"] if choice.title == "fp64"]
    exact = [case for case in cases if fp64 in case.choices]
    return cases + _covering(strategy, _left_in(fp64, strategy, exact, choices), (fp64,), choices, draw)


def batchnorm_cases(strategy: str) -> list[Case]:
    """Return those that compare BatchNorm's running statistics on 1, 2, 3 and 4 ranks in float64."""
    (fp64,) = [choice for choice in factors()["precision"] if choice.title == "fp64"]
    found = [case_of(strategy, (shape, fp64, Choice("model", (RESNET,)))) for shape in (Shape(1, 4), *SHAPES)]
    return [case for case in found if not problems_of(case)]


def all_cases(strategy: str) -> list[Case]:
    """Return what the report trains: all pairs of features, and BatchNorm by number of ranks."""
    return list({str(case): case for case in (*allowed_cases(strategy), *batchnorm_cases(strategy))}.values())


def _covering(
    strategy: str,
    pairs: Sequence[tuple[_Value, ...]],
    fixed: tuple[Choice, ...],
    choices: Mapping[str, list[Choice]],
    draw: random.Random,
) -> list[Case]:
    """Return cases that hold all ``pairs``, and ``fixed`` each.

    Greedily: from each pair that is left, completed by what covers most of the others.
    """
    left = set(pairs)
    starts = list(pairs)
    draw.shuffle(starts)
    cases = []
    for start in starts:
        if start in left:
            values = _completed(strategy, (*start, *fixed), choices, left, draw)
            left -= set(combinations(values, 2))
            cases.append(case_of(strategy, values))
    return cases


def _left_in(
    precision: Choice, strategy: str, known: Sequence[Case], choices: Mapping[str, list[Choice]]
) -> list[tuple[_Value, ...]]:
    """Return the allowed pairs of features, and of a number of ranks and a feature, that no case holds."""
    others = [column for key, column in choices.items() if key != precision.factor]
    features = [[each for each in column if each.title] for column in others]
    held = {pair for case in known for pair in combinations((case.shape.ranks, *case.choices), 2)}
    shapes = [[shape for shape in SHAPES if shape.ranks == ranks] for ranks in (2, 4)]
    wanted = [pair for one, other in combinations(features, 2) for pair in product(one, other)]
    found: list[tuple[_Value, ...]] = [
        pair for pair in wanted if pair not in held and _is_allowed(strategy, (*pair, precision))
    ]
    for of_ranks, feature in product(shapes, [each for column in features for each in column]):
        fitting = [shape for shape in of_ranks if _is_allowed(strategy, (shape, feature, precision))]
        if fitting and (fitting[0].ranks, feature) not in held:
            found.append((fitting[-1], feature))
    return found


_Value = Shape | Choice


def _columns(choices: Mapping[str, list[Choice]]) -> list[Sequence[_Value]]:
    return [SHAPES, *choices.values()]


def case_of(strategy: str, values: Sequence[_Value]) -> Case:
    """Return the case of these values, anything allowed for the factors that are omitted."""
    shape = next((value for value in values if isinstance(value, Shape)), SHAPES[0])
    given = {value.factor: value for value in values if isinstance(value, Choice)}
    rest = {key: value[0] for key, value in factors().items()}
    return Case(strategy, shape, tuple(given.get(key, first) for key, first in rest.items()))


@cache
def _is_allowed(strategy: str, values: tuple[_Value, ...]) -> bool:
    return not problems_of(case_of(strategy, values))


def _completed(
    strategy: str,
    start: tuple[_Value, ...],
    choices: Mapping[str, list[Choice]],
    left: set[tuple[_Value, ...]],
    draw: random.Random,
) -> tuple[_Value, ...]:
    values: list[_Value] = []
    chosen = list(start)
    for column in _columns(choices):
        given = [value for value in chosen if value in column]
        if not given:
            ranked = sorted(column, key=_rank(chosen, left, draw))
            given = [next(v for v in ranked if _is_allowed(strategy, (*chosen, v)))]
            chosen += given
    for column in _columns(choices):  # in the order of the pairs
        values += [value for value in column if value in chosen]
    return tuple(values)


def _rank(
    chosen: Sequence[_Value], left: set[tuple[_Value, ...]], draw: random.Random
) -> Callable[[_Value], tuple[int, float]]:
    def rank(value: _Value) -> tuple[int, float]:
        new = sum((value, other) in left or (other, value) in left for other in chosen)
        return -new, draw.random()

    return rank


def refusals() -> Iterator[tuple[str, str, Problem]]:
    """Yield (strategy, feature's title, problem) of each that no model of ours can be trained with."""
    for strategy in STRATEGIES:
        for column in factors().values():
            for choice in column:
                if choice.title and (problem := _refused(strategy, choice)):
                    yield strategy, choice.title, problem


def refused_with_batchnorm(strategy: str, title: str) -> Problem | None:
    """Return why this works with no model that has BatchNorm; None where it does."""
    choice = next(choice for column in factors().values() for choice in column if choice.title == title)
    if problems_of(case_of(strategy, (Choice("model", (RESNET,)),))):
        return None
    found = problems_of(case_of(strategy, (choice, Choice("model", (RESNET,)))))
    return found[0] if found else None


def _refused(strategy: str, choice: Choice) -> Problem | None:
    """Return why the feature works with this strategy for neither model; None where it does."""
    found = [problems_of(case_of(strategy, (choice, Choice("model", (model,))))) for model in (VIT, RESNET)]
    return found[0][0] if all(found) else None


def sample(ranks: int, count: int, seed: int, compiled: int) -> list[Case]:
    """Draw cases of some number of ranks, ``compiled`` of them with a compiler. Strategies take turns."""
    draw = random.Random(seed)
    turns = [[case for case in allowed_cases(each) if case.shape.ranks == ranks] for each in STRATEGIES]
    for turn in turns:
        draw.shuffle(turn)
    turns = turns[ranks:] + turns[:ranks]  # few of each number: not always of the same strategies
    found: list[Case] = []
    while len(found) < count and any(turns):
        wants_compiler = len(found) >= count - compiled
        fitting = [case for case in turns[0] if case.is_compiled == wants_compiler]
        # Two of three where all is compared to 1e-9.
        fitting.sort(key=lambda case: ("fp64" in case.titles) != (len(found) % 3 < 2))
        if fitting:
            found.append(fitting[0])
            turns[0].remove(fitting[0])
        turns = turns[1:] + turns[:1]
    return found
