"""How much each rank sends in a step, by kind of collective and of link.

The volumes are those of ring algorithms, which NCCL and gloo use for large tensors. For n ranks and a
tensor of b bytes each rank sends (Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective
Communication Operations in MPICH", sections 4.1 and 4.4; NVIDIA's nccl-tests, doc/PERFORMANCE.md):

- all-gather, b the gathered tensor, and reduce-scatter, b the whole one: (n − 1)/n · b;
- all-reduce, which is both: 2 (n − 1)/n · b;
- a stage of a pipeline sends b once, and a gradient of the same size comes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from hpc_train.topology.degrees import Degrees
from hpc_train.topology.strategy_traits import traits_of

_GB = 1e9


@dataclass(frozen=True)
class Communication:
    """GB that a rank sends in one step."""

    all_reduce_gb: float = 0.0
    all_gather_gb: float = 0.0
    reduce_scatter_gb: float = 0.0
    #: Collectives of activations among tensor-parallel ranks.
    tensor_gb: float = 0.0
    #: Activations and their gradients, between stages.
    pipeline_gb: float = 0.0
    #: The parts of the sum within a node and between nodes.
    within_node_gb: float = 0.0
    between_nodes_gb: float = 0.0

    def to_json(self) -> dict[str, float]:
        """Return ``communication`` of ``plan --json``: GB with 4 significant digits."""
        return {key: float(f"{value:.4g}") for key, value in asdict(self).items()}


def communication(
    strategy: str, degrees: Degrees, ranks_per_node: int, tensors: Mapping[str, int]
) -> Communication:
    """Return a rank's volumes. ``tensors``: kind of collective → bytes of the whole tensors in a step."""
    shards = traits_of(strategy).shards_parameters
    # Data-parallel ranks reduce gradients over both axes, unless gradient shards are reduced over copies.
    scattered = tensors.get("reduce_scatter", 0)
    reduced = scattered / degrees.shard if shards else tensors.get("all_reduce", 0)
    reducing = degrees.replicate if shards else degrees.data_ranks
    by_kind = {
        "all_reduce_gb": 2 * _ring(reducing, reduced),
        "all_gather_gb": _ring(degrees.shard, tensors.get("all_gather", 0)),
        "reduce_scatter_gb": _ring(degrees.shard, scattered),
        "tensor_gb": 2 * _ring(degrees.tensor, tensors.get("tensor_all_reduce", 0)),
        "pipeline_gb": tensors.get("send", 0) / _GB,
    }
    shard_axis = "replicate" if not shards else "shard"
    axes = {
        "all_reduce_gb": "replicate",
        "all_gather_gb": "shard",
        "reduce_scatter_gb": shard_axis,
        "tensor_gb": "tensor",
        "pipeline_gb": "pipeline",
    }
    within = sum(gb for kind, gb in by_kind.items() if _span(axes[kind], degrees) <= ranks_per_node)
    return Communication(**by_kind, within_node_gb=within, between_nodes_gb=sum(by_kind.values()) - within)


def _ring(ranks: int, nbytes: float) -> float:
    return (ranks - 1) / ranks * nbytes / _GB


def _span(axis: str, degrees: Degrees) -> int:
    """Return the number of neighbouring ranks that a group along this axis spans (``topology.degrees``)."""
    shard = degrees.tensor * degrees.shard
    return {
        "tensor": degrees.tensor,
        "shard": shard,
        "replicate": shard * degrees.replicate,
        "pipeline": degrees.world_size,
    }[axis]
