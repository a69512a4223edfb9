"""Which models of torchvision detect objects: they return boxes and compute their own losses."""

from __future__ import annotations

from hpc_train.registry import is_factory, split_name

#: Beginnings of their names; torchvision's others also need masks or keypoints.
_DETECTORS = ("fasterrcnn_", "retinanet_", "fcos_", "ssd300_", "ssdlite320_")


def is_detector(model: str) -> bool:
    """Tell whether ``model.name`` is one of torchvision's detectors."""
    provider, rest = ("", "") if is_factory(model) else split_name(model)
    return provider == "torchvision" and rest.startswith(_DETECTORS)
