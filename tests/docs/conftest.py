"""The pages run on the cluster of the Slurm tests."""

from tests.slurm.conftest import _with_accounting, cluster

__all__ = ["_with_accounting", "cluster"]
