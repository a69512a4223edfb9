"""Loads weights from a file: read without executing code, matched by name, the head replaced.

A model's ``LoadReport`` records the tensors loaded from a file or a hub.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from hpc_train.errors import BadFileError

StateDict = dict[str, Tensor]
#: Changes weights to a model's shapes.
Converter = Callable[[nn.Module, StateDict], StateDict]

_KEY = "model.pretrained"
#: The keys of the weights in a .pth that has other entries too, by convention of timm and others.
_NESTED_UNDER = ("state_dict", "model")
#: Prefixes that wrappers add to each name: DDP, torch.compile.
_PREFIXES = ("module.", "_orig_mod.")
#: Number of names that a message lists.
_MOST_NAMES = 5

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadReport:
    """Which of a model's tensors came from pretrained weights, by name."""

    #: Description of the file or the hub.
    source: str
    num_loaded: int
    num_tensors: int
    #: Missing in the weights, so random: the head for another number of classes.
    missing: tuple[str, ...] = ()
    #: In the weights but not used by the model.
    unexpected: tuple[str, ...] = ()
    #: Converted to another shape, such as position embeddings.
    resized: tuple[str, ...] = ()

    def line(self, most_names: int = 3) -> str:
        """Return one line with counts, and up to this many names of each kind."""
        parts = [
            f"{len(names)} {kind} ({_listed(names, most_names)})"
            for kind, names in (
                ("missing and random", self.missing),
                ("unexpected", self.unexpected),
                ("resized", self.resized),
            )
            if names
        ]
        loaded = f"pretrained weights: {self.num_loaded} of {self.num_tensors} tensors from {self.source}"
        return "; ".join([loaded, *parts])


_reports: WeakKeyDictionary[nn.Module, LoadReport] = WeakKeyDictionary()


def report_of(model: nn.Module) -> LoadReport | None:
    """Return the report of the weights in ``model``; None if none were loaded, or by its own code."""
    return _reports.get(model)


def keep_report(model: nn.Module, report: LoadReport) -> None:
    """Store the report of ``model``, and log it with all names."""
    _reports[model] = report
    _log.info("%s", report.line(most_names=len(model.state_dict()) + len(report.unexpected)))


def hub_report(
    model: nn.Module, source: str, missing: Iterable[str], resized: Iterable[str] = ()
) -> LoadReport:
    """Return the report of a library that loaded its own weights, all except ``missing``."""
    total, random = len(_weights_of(model)), tuple(sorted(missing))
    return LoadReport(source, total - len(random), total, random, (), tuple(sorted(resized)))


def unchanged(_model: nn.Module, weights: StateDict) -> StateDict:
    """Return the weights as they are: the ``Converter`` of models that have none."""
    return weights


def load_weights(model: nn.Module, path: str, *, convert: Converter = unchanged) -> None:
    """Load the weights in the file ``path`` (.safetensors or a .pth of tensors) into ``model``.

    A head for another number of classes is skipped and stays random; ``report_of`` lists its names.
    ``convert`` may change the weights before they are matched. Raises BadFileError if the file can't be read,
    or its names or shapes do not match the model's.
    """
    original = read_weights(path)
    weights = convert(model, original)
    head = head_keys(model)
    expected = model.state_dict()
    dropped = {key for key in head & weights.keys() if _other_classes(weights[key], expected[key])}
    matched = {key: value for key, value in weights.items() if key not in dropped}
    absent = {
        key for key in expected.keys() - matched.keys() if not key.endswith("num_batches_tracked")
    } - dropped
    _refuse_mismatch(path, matched, expected, absent)
    _load(model, matched, path, original, original.keys() - weights.keys() - expected.keys())


def load_what_fits(model: nn.Module, weights: StateDict, source: str, convert: Converter, key: str) -> None:
    """Load the weights of another model, by name; ``report_of`` lists the loaded and the random tensors.

    A head of another shape is skipped. ``source``: for the report; ``convert``: converts weights to this
    model's shapes if possible. Raises BadFileError, for ``key`` of the file, if the model has none of the
    names, or if a tensor other than the head has another shape.
    """
    expected, loaded = model.state_dict(), convert(model, weights)
    misfits = {name for name in loaded.keys() & expected.keys() if loaded[name].shape != expected[name].shape}
    fitting = {name: loaded[name] for name in loaded.keys() & expected.keys() - misfits}
    if not fitting:
        raise BadFileError(
            f"{key}: none of the {len(loaded)} tensors of {source} has a name of this model "
            f"({_listed(loaded, 3)} there, {_listed(expected, 3)} here); "
            f"give the weights of a model like {type(model).__name__}"
        )
    if unfit := misfits - head_keys(model):
        raise BadFileError(
            f"{key}: {source} does not fit the model: {_other_shapes(loaded, expected, unfit)}; "
            "write the model.args of those weights"
        )
    _load(model, fitting, source, weights, loaded.keys() - expected.keys())


def _load(model: nn.Module, fitting: StateDict, source: str, before: StateDict, unexpected: set[str]) -> None:
    """Load the tensors ``fitting``, and store the report. ``before``: the weights before conversion."""
    model.load_state_dict(fitting, strict=False)
    names = _weights_of(model)
    resized = {key for key in fitting.keys() & before.keys() if fitting[key].shape != before[key].shape}
    loaded = len(fitting.keys() & names)
    kinds = (tuple(sorted(keys)) for keys in (names - fitting.keys(), unexpected, resized))
    keep_report(model, LoadReport(source, loaded, len(names), *kinds))


def _weights_of(model: nn.Module) -> set[str]:
    return {key for key in model.state_dict() if not key.endswith("num_batches_tracked")}


def read_weights(path: str, key: str = _KEY) -> StateDict:
    """Return the tensors in ``path`` under the names of the unwrapped model, on the CPU.

    ``key``: the key of the experiment file that contains the path, for errors.
    """
    if not Path(path).is_file():
        raise BadFileError(
            f"{key}: there is no file {path}; write true for the hub's weights, or an existing path"
        )
    try:
        content: object = load_file(path) if _is_safetensors(path) else _read_pickled(path, key)
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise BadFileError(
            f"{key}: {path} is damaged or not a file of weights: {error}; give another file"
        ) from error
    return {_bare(name): tensor for name, tensor in _tensors(path, content, key).items()}


def head_name(model: nn.Module) -> str | None:
    """Return the name of the layer that produces the logits: the last nn.Linear, else the last nn.Conv2d."""
    for kind in (nn.Linear, nn.Conv2d):
        names = [name for name, module in model.named_modules() if isinstance(module, kind)]
        if names:
            return names[-1]
    return None


def _is_safetensors(path: str) -> bool:
    """Return True for the suffix .safetensors, or content that starts with a length and JSON."""
    with Path(path).open("rb") as file:
        return path.endswith(".safetensors") or file.read(9)[8:] == b"{"


def _read_pickled(path: str, key: str) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise BadFileError(
            f"{key}: {path} is not a file of plain tensors: it is damaged, or contains Python objects, "
            "which could run code when loaded; save only the state_dict(), best as .safetensors"
        ) from error


def _tensors(path: str, data: object, key: str) -> StateDict:
    """Return the state dict in a loaded file, which may be one level down."""
    for nested in _NESTED_UNDER:
        if isinstance(data, Mapping) and isinstance(data.get(nested), Mapping):
            data = data[nested]
    if not isinstance(data, Mapping) or not data or not all(_is_weight(k, v) for k, v in data.items()):
        raise BadFileError(
            f"{key}: {path} contains no state dict (names → tensors); save the model's state_dict()"
        )
    return dict(data)


def _is_weight(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor)


def _bare(name: str) -> str:
    while prefix := next((p for p in _PREFIXES if name.startswith(p)), None):
        name = name.removeprefix(prefix)
    return name.replace("._orig_mod.", ".")  # blocks that were compiled individually


def head_keys(model: nn.Module) -> set[str]:
    """Return the names of the head's tensors; timm's models define their own heads."""
    timm_config: Any = getattr(model, "pretrained_cfg", None) or {}
    classifier = timm_config.get("classifier") or head_name(model) or ()
    names = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    return {key for key in model.state_dict() if key.rpartition(".")[0] in names}


def _other_classes(loaded: Tensor, expected: Tensor) -> bool:
    return loaded.shape[1:] == expected.shape[1:] and loaded.shape[:1] != expected.shape[:1]


def _refuse_mismatch(path: str, loaded: StateDict, expected: Mapping[str, Tensor], absent: set[str]) -> None:
    """Raise BadFileError that lists all mismatches between the file and this model."""
    shapes = [key for key in loaded.keys() & expected.keys() if loaded[key].shape != expected[key].shape]
    unknown = loaded.keys() - expected.keys()
    problems = [
        f"{difference} {listed}"
        for difference, listed in (
            ("lacks", _listed(absent)),
            ("has besides", _listed(unknown)),
            ("has in another shape", _other_shapes(loaded, expected, shapes)),
        )
        if listed
    ]
    if problems:
        raise BadFileError(
            f"{_KEY}: {path} does not fit the model: it {'; it '.join(problems)}; "
            "give the weights of the same model.name and model.args"
        )


def _other_shapes(loaded: StateDict, expected: Mapping[str, Tensor], names: Iterable[str]) -> str:
    return _listed(
        f"{name} {tuple(loaded[name].shape)} instead of {tuple(expected[name].shape)}" for name in names
    )


def _listed(names: Iterable[str], most: int = _MOST_NAMES) -> str:
    in_order = sorted(names)
    more = f" and {len(in_order) - most} more" if len(in_order) > most else ""
    return ", ".join(in_order[:most]) + more
