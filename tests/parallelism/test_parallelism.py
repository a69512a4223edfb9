"""Every strategy, beside every feature that it allows, against plain PyTorch on one device.

``make test`` runs a sample, a new one where ``HPC_TRAIN_PARALLEL_SEED`` is set; ``make test-full`` runs all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

from hpc_train.training.optimization import Optimization
from tests.parallelism import cases as cases_module
from tests.parallelism import training
from tests.parallelism.cases import (
    FEATURES,
    STRATEGIES,
    Case,
    Choice,
    Shape,
    allowed_cases,
    factors,
    problems_of,
    sample,
)
from tests.parallelism.comparing import Comparison
from tests.parallelism.groups import Groups, RankError

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("HPC_TRAIN_PARALLEL_SEED", "0"))
RUNS_ALL = os.environ.get("HPC_TRAIN_ALL_PARALLEL") == "1"


@pytest.fixture(scope="module")
def comparison() -> Iterator[Comparison]:
    with closing(Comparison()) as made:
        yield made


def assert_equal_plain_pytorch(comparison: Comparison, cases: Sequence[Case]) -> None:
    """Train them all; then say which are apart."""
    assert cases
    problems = []
    for case in cases:
        try:
            found = comparison.deviation(case)
        except (RankError, AssertionError) as error:
            problems.append(f"{case}: {error}")
            continue
        if not found.is_within:
            problems.append(f"{case}: {found}")
    assert not problems, f"{len(problems)} of {len(cases)}:\n" + "\n".join(problems)


@pytest.mark.parametrize(("ranks", "count", "compiled"), [(2, 8, 1), (3, 1, 0), (4, 3, 0)])
def test_a_sample_equals_plain_pytorch(comparison: Comparison, ranks: int, count: int, compiled: int) -> None:
    assert_equal_plain_pytorch(comparison, sample(ranks, count, SEED, compiled))


@pytest.mark.skipif(not RUNS_ALL, reason="a sample was run; make test-full runs all")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_that_is_allowed_equals_plain_pytorch(comparison: Comparison, strategy: str) -> None:
    assert_equal_plain_pytorch(comparison, allowed_cases(strategy))


def small_case(strategy: str, *overrides: str) -> Case:
    chosen = {name: column[0] for name, column in factors().items()}
    own = [Choice(override.partition("=")[0], (override,)) for override in overrides]
    values = {choice.factor: choice for choice in (*chosen.values(), *own)}
    return Case(strategy, Shape(2, 4), tuple(values.values()))


def lose_a_micro_batch(rank: int, ranks: int) -> None:
    """From now on this rank's last micro-batch counts twice instead of once."""
    right = vars(training)["slots"]

    def wrong(*args: Any) -> Any:
        first, *others = right(*args)
        return [first, *others[:-1], replace(others[-1], weight=2 * others[-1].weight)]

    vars(training)["slots"] = wrong


def double_gradients(rank: int, ranks: int) -> None:
    """From now on backward begins at twice the loss."""
    right = Optimization.scale
    Optimization.scale = lambda self, loss: 2 * right(self, loss)  # type: ignore[method-assign]


@pytest.mark.parametrize("mistake", [lose_a_micro_batch, double_gradients])
def test_what_is_wrong_is_seen(mistake: Callable[[int, int], None]) -> None:
    """The limits are narrow enough to see one micro-batch of four with a wrong weight, and wrong gradients
    even where losses alone are compared.
    """
    with closing(Comparison()) as comparison:
        cases = [small_case("ddp", f"precision={name}") for name in ("fp64", "fp32", "bf16", "fp16")]
        assert [comparison.deviation(case).is_within for case in cases] == [True] * 4
        comparison.groups.run(2, mistake)
        assert [comparison.deviation(case).is_within for case in cases] == [False] * 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_cases_hold_every_pair_that_is_allowed(strategy: str) -> None:
    found = allowed_cases(strategy)
    assert found == allowed_cases(strategy), "the same on all workers"
    assert not any(problems_of(case) for case in found)
    held = {pair for case in found for pair in combinations(sorted(case.titles), 2)}
    titles = {feature.title for feature in FEATURES if feature.on_cpu}
    refused = {title for of, title, _ in cases_module.refusals() if of == strategy}
    assert {title for pair in held for title in pair} == titles - refused
    # Each with each, but for those that set the same key, and those that are refused together.
    for one, other in combinations(sorted(titles - refused), 2):
        assert (one, other) in held or _excluded(strategy, one, other), f"{one} with {other}"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_in_fp64_each_feature_meets_each_other_and_two_and_four_ranks(strategy: str) -> None:
    exact = [case for case in allowed_cases(strategy) if "fp64" in case.titles]
    held = {pair for case in exact for pair in combinations((case.shape.ranks, *sorted(case.titles)), 2)}
    # In any precision, by the test above.
    titles = sorted({title for case in exact for title in case.titles} - {"fp64"})
    for one, other in combinations(titles, 2):
        assert (one, other) in held or _excluded(strategy, "fp64", one, other), f"{one} with {other}"
    for title in titles:
        ranks = {ranks for ranks, of in held if of == title}
        assert {2, 4} <= ranks, f"{title} on {ranks}"


def _excluded(strategy: str, *titles: str) -> bool:
    chosen = [choice for column in factors().values() for choice in column if choice.title in titles]
    if len({choice.factor for choice in chosen}) < len(chosen):
        return True
    models = factors()["model"]
    return all(problems_of(cases_module.case_of(strategy, (*chosen, model))) for model in models)


def fail_on_rank_1(rank: int, ranks: int) -> int:
    if rank == 1:
        raise ValueError("told to fail")
    return rank


def name_of(rank: int, ranks: int) -> tuple[int, int]:
    flag = torch.ones(())
    torch.distributed.all_reduce(flag)
    return rank, int(flag)


def process_id(rank: int, ranks: int) -> int:
    return os.getpid()


def test_a_group_stays_and_one_that_failed_is_replaced() -> None:
    with closing(Groups()) as groups:
        assert groups.run(2, name_of) == [(0, 2), (1, 2)]
        ids = groups.run(2, process_id)
        assert groups.run(2, process_id) == ids
        with pytest.raises(RankError, match=r"(?s)rank 1: .*told to fail"):
            groups.run(2, fail_on_rank_1)
        assert groups.run(2, name_of) == [(0, 2), (1, 2)]
        assert not set(groups.run(2, process_id)) & set(ids)
