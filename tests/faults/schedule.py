"""Schedules: which faults strike a run and when, drawn from a seed so that a failure can be had again."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tests.faults.faults import (
    Fault,
    FullDisk,
    InputOutputError,
    Interrupt,
    Kill,
    KillAtTouch,
    KillController,
    KillLauncher,
    KillNode,
    KillWithoutController,
    Preemption,
    Refusal,
    Requeue,
    Signals,
    Stop,
    TimeLimit,
)

#: Which seeds tests take: ``1-20``.
SEEDS = "HPC_TRAIN_FAULT_SEEDS"
_STOPS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
#: On Slurm a rank gets these two; an interrupt ends srun itself.
_SLURM_STOPS = (signal.SIGTERM, signal.SIGUSR2)
#: A rank touches a checkpoint's files more often than this in the saves after the strike.
_MOST_TOUCHES = 30
_MOST_WRITES = 6


@dataclass(frozen=True)
class Frame:
    """What a schedule is drawn for."""

    ranks: int
    nodes: int
    #: Strikes come after a step from ``first`` to ``last``.
    first: int
    last: int


Draw = Callable[[Random, Frame, int], Fault]


def signal_to_one(random: Random, frame: Frame, step: int) -> Fault:
    return Signals(step, (random.choice(_STOPS),), random.randrange(frame.ranks))


def signal_to_all(random: Random, frame: Frame, step: int) -> Fault:
    return Signals(step, (random.choice(_STOPS),))


def two_signals(random: Random, frame: Frame, step: int) -> Fault:
    return Signals(step, tuple(random.sample(_STOPS, 2)), random.choice([None, *range(frame.ranks)]))


def slurm_signal(random: Random, frame: Frame, step: int) -> Fault:
    return Signals(step, (random.choice(_SLURM_STOPS),), random.choice([None, *range(frame.ranks)]))


def interrupt(random: Random, frame: Frame, step: int) -> Fault:
    return Interrupt(step)


def kill_one(random: Random, frame: Frame, step: int) -> Fault:
    return Kill(step, (random.randrange(frame.ranks),))


def kill_all(random: Random, frame: Frame, step: int) -> Fault:
    return Kill(step, tuple(random.sample(range(frame.ranks), frame.ranks)))


def kill_ranks_of_a_node(random: Random, frame: Frame, step: int) -> Fault:
    each = frame.ranks // frame.nodes
    first = random.randrange(frame.nodes) * each
    return Kill(step, tuple(range(first, first + each)))


def kill_launcher(random: Random, frame: Frame, step: int) -> Fault:
    return KillLauncher(step)


def stop(random: Random, frame: Frame, step: int) -> Fault:
    return Stop(step, random.randrange(frame.ranks))


def kill_at_touch(random: Random, frame: Frame, step: int) -> Fault:
    return KillAtTouch(step, random.randrange(frame.ranks), random.randint(1, _MOST_TOUCHES))


def no_room(random: Random, frame: Frame, step: int) -> Fault:
    return Refusal(step, random.randrange(frame.ranks), random.randint(1, _MOST_WRITES), errno.ENOSPC)


def no_quota(random: Random, frame: Frame, step: int) -> Fault:
    return Refusal(step, random.randrange(frame.ranks), random.randint(1, _MOST_WRITES), errno.EDQUOT)


def input_output_error(random: Random, frame: Frame, step: int) -> Fault:
    return InputOutputError(step, random.randrange(frame.ranks), random.randint(1, _MOST_WRITES))


def full_disk(random: Random, frame: Frame, step: int) -> Fault:
    return FullDisk(step, random.choice([0, 4096, random.randrange(500_000)]))


def preemption(random: Random, frame: Frame, step: int) -> Fault:
    return Preemption(step)


def requeue(random: Random, frame: Frame, step: int) -> Fault:
    return Requeue(step)


def kill_node(random: Random, frame: Frame, step: int) -> Fault:
    return KillNode(step, random.randrange(frame.nodes), with_ranks=random.random() < 0.5)


def lose_node(random: Random, frame: Frame, step: int) -> Fault:
    how = random.choice(["power", "daemons", "slurmd"])
    node = random.randrange(frame.nodes)
    return KillNode(step, node, with_ranks=how == "power", only_slurmd=how == "slurmd")


def time_limit(random: Random, frame: Frame, step: int) -> Fault:
    return TimeLimit(step)


def kill_controller(random: Random, frame: Frame, step: int) -> Fault:
    return KillController(step, random.uniform(0, 3))


def kill_without_controller(random: Random, frame: Frame, step: int) -> Fault:
    return KillWithoutController(step, random.randrange(frame.ranks), random.uniform(0, 8))


#: What a kind of schedule draws, one fault each, in an order of the seed's.
KINDS: dict[str, Sequence[Draw]] = {
    "signals": (signal_to_one, signal_to_all, interrupt),
    "two signals": (two_signals,),
    "kills": (kill_one, kill_all, kill_launcher),
    "writes": (kill_at_touch, kill_at_touch),
    "no room": (no_room, no_quota),
    "input/output error": (input_output_error,),
    "full disk": (full_disk,),
    "hang": (stop,),
    "preemption": (preemption, slurm_signal),
    "daemons": (kill_controller, kill_without_controller),
    "node": (kill_node,),
    "requeue": (requeue, kill_ranks_of_a_node),
}
#: Kills are drawn more often: what follows one within the same job is what can go wrong.
SOAK: Sequence[Draw] = (
    kill_one, kill_one, kill_ranks_of_a_node, slurm_signal, preemption, requeue, time_limit, lose_node,
)  # fmt: skip


@dataclass(frozen=True)
class Schedule:
    """Faults in the order in which they strike, each at a later step than the one before."""

    seed: int
    kind: str
    faults: tuple[Fault, ...]

    @classmethod
    def of(cls, seed: int, kind: str, frame: Frame) -> Schedule:
        random = Random(f"{kind} {seed}")
        draws = list(KINDS[kind]) if kind in KINDS else random.choices(SOAK, k=random.randint(2, 3))
        random.shuffle(draws)
        steps = sorted(random.sample(range(frame.first, frame.last + 1), len(draws)))
        return cls(
            seed, kind, tuple(draw(random, frame, step) for draw, step in zip(draws, steps, strict=True))
        )


def chosen_seeds(default: str) -> list[int]:
    """Return the seeds that the environment asks for, or the default ones."""
    return parse_seeds(os.environ.get(SEEDS) or default)


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of ``a-b`` or ``a``, both ends included, or several with commas. Raises ValueError."""
    ranges = [part.partition("-") for part in text.split(",")]
    return [seed for first, _, last in ranges for seed in range(int(first), int(last or first) + 1)]
