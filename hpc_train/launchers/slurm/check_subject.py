"""Input of ``doctor``'s checks of a Slurm cluster, and helpers for their findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpc_train.config.cluster_sections import SlurmConfig
from hpc_train.launchers.findings import Finding, Level
from hpc_train.launchers.slurm import options, request_checks
from hpc_train.launchers.slurm.cluster_facts import ClusterFacts, Partition

CONFIG = "scontrol show config"
ADMINISTRATORS = "ask the administrators for {} (slurm.conf)"
#: Assumed, while no run of this user has saved: a model of a few GB on a shared disk.
ASSUMED_SAVE_S = 10.0


@dataclass(frozen=True)
class Subject:
    """The subject of the checks: a cluster, and with ``slurm`` a file's request."""

    facts: ClusterFacts
    slurm: SlurmConfig | None = None
    #: The longest save so far; None while there is none.
    longest_save_s: float | None = None
    #: Seconds between the signal and the time limit.
    lead_s: int = options.FIRST_LEAD_S
    place: Callable[[str], str] = str

    @property
    def save_s(self) -> float:
        """Seconds that a save may take: the longest so far, else ``ASSUMED_SAVE_S``."""
        return ASSUMED_SAVE_S if self.longest_save_s is None else self.longest_save_s

    @property
    def save_words(self) -> str:
        """``save_s`` for a message, and whether it was measured."""
        is_measured = self.longest_save_s is not None
        return f"the longest save so far took {self.save_s:.1f} s" if is_measured else "a save may take 10 s"

    @property
    def used(self) -> list[Partition]:
        """The partitions to which the file submits, or the default one."""
        return request_checks.used(self.slurm or SlurmConfig(), self.facts)

    def level_of(self, partition: Partition) -> Level:
        """Return the level of a problem that makes jobs of the partition fail."""
        return Level.ERROR if partition in self.used else Level.WARNING


def configuration(check: str, level: Level, problem: str, effect: str, remedy: str) -> Finding:
    """Return a finding on a setting of slurm.conf."""
    return Finding(level, f"slurm.{check}", problem, CONFIG, effect, remedy)


def fine(check: str, result: str, source: str = CONFIG) -> Finding:
    """Return the finding of a passed check."""
    return Finding(Level.OK, f"slurm.{check}", result, source)
