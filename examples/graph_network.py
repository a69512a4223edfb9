"""A graph network with a task, a data set and a model of one's own: graphs made of handwritten digits.

Each graph has one node per pixel with ink, joined to the inked pixels around it, and two targets: the digit
and the mean darkness of the ink. Used by graph-network.yaml.

Legend: B graphs, N = 64 nodes (pixels without ink have no edges and are masked out), F features of a node.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpc_train.plugins import Batch, DataConfig, DataInfo, DataSource, Experiment, TargetSpec, build_source

SIDE = 8


class TwoTargets:
    """Classifies a graph, and estimates a number of it."""

    def __init__(self, experiment: Experiment, info: DataInfo) -> None:
        self.target_spec = {
            "digit": TargetSpec("a digit", kind="integer", shape=(), minimum=0, maximum=info.num_classes - 1),
            "darkness": TargetSpec("a darkness", kind="float", shape=()),
        }

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return logits (B, 10) and the darkness (B,)."""
        return model(batch.inputs)

    def loss(self, outputs: dict[str, Tensor], batch: Batch) -> Tensor:
        """Return the sum of both losses, shape ()."""
        by_class = functional.cross_entropy(outputs["logits"].float(), batch.targets["digit"])
        return by_class + functional.mse_loss(outputs["darkness"].float(), batch.targets["darkness"])

    def sums(self, outputs: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """Return sums over the valid graphs of a batch."""
        hits = outputs["logits"].argmax(1) == batch.targets["digit"]
        errors = (outputs["darkness"].double() - batch.targets["darkness"]) ** 2
        return {
            "count": batch.valid.sum(),
            "correct": (hits & batch.valid).sum(),
            "squares": torch.where(batch.valid, errors, 0.0).sum(),
        }

    def metrics(self, sums: dict[str, Any]) -> dict[str, float]:
        """Turn the sums over all validation graphs into metrics."""
        rmse = (sums["squares"] / sums["count"]) ** 0.5
        return {"accuracy": sums["correct"] / sums["count"], "darkness_rmse": rmse}


class Graphs:
    """The digits of ``split`` as graphs."""

    num_classes = 10

    def __init__(self, split: Any) -> None:
        images, self.digits = split.batch(torch.arange(len(split)))
        self.images = images[:, 0, ::4, ::4].flatten(1).float() / 255  # (samples, N)
        rows, columns = torch.arange(SIDE * SIDE) // SIDE, torch.arange(SIDE * SIDE) % SIDE
        self.places = torch.stack([rows, columns], dim=1).float() / SIDE  # (N, 2)
        far = (rows[:, None] - rows).abs().maximum((columns[:, None] - columns).abs())
        self.are_neighbours = far == 1  # (N, N)

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        ink = self.images[index]
        is_node = ink > 0
        edges = self.are_neighbours & is_node[:, None] & is_node
        inputs = {
            "features": torch.cat([ink[:, None], self.places], dim=1),
            "edges": edges.float(),
            "is_node": is_node.float(),
        }
        return inputs, {"digit": self.digits[index], "darkness": ink.sum() / is_node.sum()}


def graphs() -> tuple[Graphs, Graphs]:
    """Return the training and the validation graphs."""
    source: DataSource = build_source(DataConfig(name="digits"))
    return Graphs(source.train), Graphs(source.val)


class Layer(nn.Module):
    """One round of messages: a node reads the mean of its neighbours (GraphSAGE, arXiv:1706.02216)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.of_node, self.of_neighbours = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, nodes_BNF: Tensor, mean_BNN: Tensor) -> Tensor:  # noqa: N803
        """Return the nodes (B, N, F) after the round; ``mean_BNN`` averages over neighbours."""
        read = self.of_node(nodes_BNF) + self.of_neighbours(mean_BNN @ nodes_BNF)
        return nodes_BNF + functional.gelu(self.norm(read))


class GraphNetwork(nn.Module):
    """Rounds of messages, then the mean over the nodes."""

    def __init__(self, num_classes: int, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(3, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.classes, self.darkness = nn.Linear(width, num_classes), nn.Linear(width, 1)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return logits (B, num_classes) and the darkness (B,)."""
        edges_BNN, is_node_BN = inputs["edges"], inputs["is_node"]  # noqa: N806
        mean_BNN = edges_BNN / edges_BNN.sum(2, keepdim=True).clamp(min=1)  # noqa: N806
        nodes_BNF = self.stem(inputs["features"])  # noqa: N806
        for layer in self.layers:
            nodes_BNF = layer(nodes_BNF, mean_BNN)  # noqa: N806
        pooled = (nodes_BNF * is_node_BN[:, :, None]).sum(1) / is_node_BN.sum(1, keepdim=True)
        return {"logits": self.classes(pooled), "darkness": self.darkness(pooled)[:, 0]}
