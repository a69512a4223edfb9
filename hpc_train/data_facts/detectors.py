"""The object detectors among torchvision's models: they return boxes and compute their own losses."""

from __future__ import annotations

from hpc_train.registry import is_factory, split_name

#: Prefixes of their names; torchvision's other detectors also need masks or keypoints.
_DETECTORS = ("fasterrcnn_", "retinanet_", "fcos_", "ssd300_", "ssdlite320_")


def is_detector(model: str) -> bool:
    """Return True if ``model.name`` is one of torchvision's detectors."""
    provider, rest = ("", "") if is_factory(model) else split_name(model)
    return provider == "torchvision" and rest.startswith(_DETECTORS)
