"""The rule by which a step is a spike, and the file of spikes."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from hpc_train.run.digests import DigestsFile, StepDigest
from hpc_train.run.spikes import WARM_UP, WINDOW, Spike, SpikeRule, SpikesFile, in_words, read_spikes, rule_at


def numbers(count: int, seed: int = 0) -> list[tuple[float, float]]:
    """Return losses that fall, with noise, and norms whose logarithm is normal."""
    draw = random.Random(seed)
    return [(2 * 0.999**step + draw.gauss(0, 0.05), draw.lognormvariate(0, 0.3)) for step in range(count)]


def filled(count: int = WINDOW) -> SpikeRule:
    rule = SpikeRule()
    for step, (loss, norm) in enumerate(numbers(count), 1):
        assert rule.judge(step, loss, norm) is None, (step, loss, norm)
    return rule


@pytest.mark.parametrize(
    ("loss", "norm", "is_spike"),
    [
        (1.8, 1.0, False),
        (2.1, 1.0, False),
        (3.0, 1.0, True),
        (-9.0, 1.0, False),
        (1.8, 3.0, False),
        (1.8, 100.0, True),
        (1.8, 1e-9, False),
        (1.8, None, False),
        (3.0, None, True),
        (math.nan, 1.0, False),
        (math.nan, 100.0, True),
        (3.0, math.inf, True),
    ],
)
def test_only_a_rise_far_above_the_window_is_a_spike(loss: float, norm: float | None, is_spike: bool) -> None:
    spike = filled().judge(7, loss, norm)
    assert (spike is not None) == is_spike
    assert spike is None or ("above" in str(spike) and str(spike).startswith("step 7: "))


def test_the_first_steps_are_not_judged() -> None:
    assert filled(WARM_UP - 1).judge(9, 50.0, 500.0) is None
    assert filled(WARM_UP).judge(9, 50.0, 500.0) is not None


def test_equal_losses_have_a_minimum_scale() -> None:
    rule = SpikeRule()
    for _ in range(WARM_UP):
        rule.add(1.0, 1.0)
    assert rule.judge(9, 1.04, 1.04) is None and rule.judge(9, 1.06, 1.0) is not None
    assert rule.judge(9, 1.0, 1.06) is not None


def test_losses_that_are_not_positive_are_compared_as_they_are() -> None:
    rule = SpikeRule()
    for step, (loss, norm) in enumerate(numbers(WINDOW)):
        assert rule.judge(step, loss - 2, norm) is None
    assert rule.judge(9, 0.5, 1.0) is not None and rule.judge(9, -0.2, 1.0) is None


def test_a_lasting_change_is_flagged_for_half_a_window_at_most() -> None:
    rule = filled()
    flagged = [
        rule.judge(step, loss + 5, norm) is not None for step, (loss, norm) in enumerate(numbers(200, 1))
    ]
    assert all(flagged[:50]) and sum(flagged) <= WINDOW // 2 + 2 and not any(flagged[WINDOW:])


def test_a_resumed_rule_has_the_same_window(tmp_path: Path) -> None:
    """Numbers that are not finite are in the digests, not in the window."""
    paths, rule = RunPaths(tmp_path), SpikeRule()
    file = DigestsFile(paths.digests, 0)
    for step, (drawn, norm) in enumerate(numbers(400), 1):
        loss = math.nan if step % 7 == 0 else drawn
        file.append([StepDigest(step, 0, loss, None if step % 5 == 0 else norm)])
        if step <= 333:
            rule.add(loss, None if step % 5 == 0 else norm)
    file.close()
    resumed = rule_at(paths, 333)
    assert resumed.to_bits() == rule.to_bits() == SpikeRule.of_bits(rule.to_bits()).to_bits()
    assert len(rule.to_bits()) == 1 + 2 * WINDOW and rule_at(paths, 0).to_bits() == [0]


def test_spikes_behind_a_resume_are_withdrawn_and_rollbacks_kept(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert in_words(paths) is None
    file = SpikesFile(paths.spikes, 0)
    back = Spike(7, 9.0, 2.0, None, None)
    file.append(Spike(3, 5.0, 2.0, 1.0, 2.0), [4, 5], "report")
    file.append(back, range(2000), "rollback")
    file.append(Spike(8, None, None, 4.0, 2.0), [6], "skip")
    file.close()
    with paths.spikes.open("a") as damaged:
        damaged.write("{\n")
    file = SpikesFile(paths.spikes, 5)
    file.append(back, range(2000), "rollback")  # met again: no checkpoint was saved since
    file.close()
    first, second = read_spikes(paths)
    assert (first.step, first.samples, second.step, second.num_samples) == (3, [4, 5], 7, 2000)
    assert len(second.samples) == 1024
    words = in_words(paths) or ""
    assert words.startswith(
        "2 spikes: step 7: loss 9 above 2, rolled back (samples 0, 1, 2, 3, 4, 5, 6, 7, …)"
    )
    assert "; step 3: loss 5 above 2, recorded (samples 4, 5); hpc-train replay" in words
