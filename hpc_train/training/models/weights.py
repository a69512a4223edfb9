"""Loads weights into a model: matched by name, without a common prefix, the head replaced.

A model's ``LoadReport`` records the tensors loaded from a file or a hub.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from hpc_train.errors import BadFileError
from hpc_train.training.models.weight_files import StateDict as StateDict
from hpc_train.training.models.weight_files import read_weights, with_notes

#: Changes weights to a model's shapes.
Converter = Callable[[nn.Module, StateDict], StateDict]

_KEY = "model.pretrained"
_OR_INIT_FROM = ", or write model.init_from in place of model.pretrained, which loads what fits"
#: Number of names that a message lists.
_MOST_NAMES = 3

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

    def line(self, most_names: int = _MOST_NAMES) -> str:
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
    """Load the weights in the file ``path`` (see ``read_weights``) into ``model``.

    A head that is missing or for another number of classes stays random; ``report_of`` lists its names.
    ``convert`` may change the weights before they are matched. Raises BadFileError if the file can't be read,
    or its names or shapes do not match the model's.
    """
    original, source = renamed(model, *read_weights(path, _KEY))
    weights = convert(model, original)
    head = head_keys(model)
    expected = model.state_dict()
    dropped = {key for key in head & weights.keys() if _other_classes(weights[key], expected[key])}
    matched = {key: value for key, value in weights.items() if key not in dropped}
    absent = {
        key for key in expected.keys() - matched.keys() if not key.endswith("num_batches_tracked")
    } - dropped
    absent -= head if absent != expected.keys() else set()
    shapes = {key for key in matched.keys() & expected.keys() if matched[key].shape != expected[key].shape}
    unknown = matched.keys() - expected.keys()
    if absent or unknown or shapes:
        can_start = not shapes and absent != expected.keys()
        raise misfit(
            f"{_KEY}: {source}", matched, expected, absent=absent, unknown=unknown, shapes=shapes,
            remedy=f"give the weights of the same model.name and model.args{_OR_INIT_FROM * can_start}",
        )  # fmt: skip
    _load(model, matched, source, original, original.keys() - weights.keys() - expected.keys())


def load_what_fits(model: nn.Module, weights: StateDict, source: str, convert: Converter, key: str) -> None:
    """Load the weights of another model, by name; ``report_of`` lists the loaded and the random tensors.

    A head of another shape is skipped. ``source``: for the report; ``convert``: converts weights to this
    model's shapes if possible. Raises BadFileError, for ``key`` of the file, if the model has none of the
    names, or if a tensor other than the head has another shape.
    """
    weights, source = renamed(model, weights, source)
    expected, loaded = model.state_dict(), convert(model, weights)
    misfits = {name for name in loaded.keys() & expected.keys() if loaded[name].shape != expected[name].shape}
    fitting = {name: loaded[name] for name in loaded.keys() & expected.keys() - misfits}
    unfit, unknown = misfits - head_keys(model), loaded.keys() - expected.keys()
    if unfit or not fitting:
        raise misfit(
            f"{key}: {source}", loaded, expected, shapes=unfit, unknown=() if fitting else unknown,
            absent=() if fitting else expected.keys() - loaded.keys(),
            remedy="write the model.name and model.args of those weights",
        )  # fmt: skip
    _load(model, fitting, source, weights, unknown)


def renamed(model: nn.Module, weights: StateDict, source: str) -> tuple[StateDict, str]:
    """Return the weights with the model's prefix in place of theirs, and ``source`` with what was changed.

    Tensors without the removed prefix belong to other modules and are skipped.
    """
    removed, added = common_prefixes(weights.keys(), model.state_dict().keys())
    if not removed and not added:
        return weights, source
    kept = {
        added + name.removeprefix(removed): value
        for name, value in weights.items()
        if name.startswith(removed)
    }
    skipped = len(weights) - len(kept)
    notes = (
        f"without the prefix {removed}" if removed else "",
        f"with the prefix {added}" if added else "",
        f"{skipped} other tensor{'s' * (skipped > 1)} skipped" if skipped else "",
    )
    return kept, with_notes(source, notes)


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


def head_name(model: nn.Module) -> str | None:
    """Return the name of the layer that produces the logits: the last nn.Linear, else the last nn.Conv2d."""
    for kind in (nn.Linear, nn.Conv2d):
        names = [name for name, module in model.named_modules() if isinstance(module, kind)]
        if names:
            return names[-1]
    return None


def head_keys(model: nn.Module) -> set[str]:
    """Return the names of the head's tensors; timm's models define their own heads."""
    timm_config: Any = getattr(model, "pretrained_cfg", None) or {}
    classifier = timm_config.get("classifier") or head_name(model) or ()
    names = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    return {key for key in model.state_dict() if key.rpartition(".")[0] in names}


def has_fitting_head(model: nn.Module, weights: StateDict) -> bool:
    """Return True if ``weights`` have a head of the shape of the model's."""
    expected = model.state_dict()
    return any(name in weights and weights[name].shape == expected[name].shape for name in head_keys(model))


def _other_classes(loaded: Tensor, expected: Tensor) -> bool:
    return loaded.shape[1:] == expected.shape[1:] and loaded.shape[:1] != expected.shape[:1]


def misfit(
    start: str,
    loaded: StateDict,
    expected: Mapping[str, Tensor],
    *,
    absent: Iterable[str] = (),
    unknown: Iterable[str] = (),
    shapes: Iterable[str],
    remedy: str,
) -> BadFileError:
    """Return the error with the inferred cause, and up to three names of each kind of mismatch."""
    other_shapes = [
        f"{name} {tuple(loaded[name].shape)} instead of {tuple(expected[name].shape)}" for name in shapes
    ]
    problems = [
        f"it {difference} {listed}"
        for difference, listed in (
            ("lacks", _listed(absent)),
            ("has besides", _listed(unknown)),
            ("has in another shape", _listed(other_shapes)),
        )
        if listed
    ]
    cause = mismatch_cause(loaded, expected, set(shapes))
    return BadFileError(f"{start} does not fit the model: {cause}; {'; '.join(problems)}; {remedy}")


def _listed(names: Iterable[str], most: int = _MOST_NAMES) -> str:
    in_order = sorted(names)
    more = f" and {len(in_order) - most} more" if len(in_order) > most else ""
    return ", ".join(in_order[:most]) + more


#: Share of the names of a file, and of a model, that a prefix must have. Assumed.
_FILE_SHARE, _MODEL_SHARE = 0.1, 0.3
#: Share of the names with the prefixes, of the file or of the model, that must match. Assumed.
_LEAST_MATCHING = 0.5
#: Pattern of names → whose they are.
_LIBRARIES = {
    r"encoder_layer_\d+\.": "torchvision's ViT",
    r"\bembeddings\.patch_embeddings\.": "transformers' ViT or similar",
    r"\bencoder\.layer\.\d+\.attention\.": "transformers' BERT or similar",
    r"\bblocks\.\d+\.attn\.": "timm's ViT",
    r"\bstages\.\d+\.blocks\.": "timm's ConvNeXt or similar",
    r"encoder\.stages\.\d+\.layers\.": "transformers' ResNet or ConvNeXt",
    r"\blayer[1-4]\.\d+\.(conv|bn|downsample)": "the ResNet of timm or torchvision",
    r"\bfeatures\.\d+\.": "torchvision's (EfficientNet, MobileNet, VGG, ConvNeXt)",
    r"\btransformer\.h\.\d+\.": "GPT-2 of transformers",
    r"\blayers\.\d+\.self_attn\.": "Llama of transformers",
}


def common_prefixes(names: Collection[str], expected: Collection[str]) -> tuple[str, str]:
    """Return the prefix to remove from the names, and the one to add, so that most are the ``expected`` ones.

    Both are empty if no other pair matches more names, or none matches enough.
    """
    wanted = set(expected)

    def matching(pair: tuple[str, str]) -> int:
        removed, added = pair
        return sum(1 for name in names if name.startswith(removed) and added + name[len(removed) :] in wanted)

    pairs = [
        (removed, added)
        for removed in ("", *_prefixes(names, _FILE_SHARE))
        for added in ("", *_prefixes(wanted, _MODEL_SHARE))
    ]
    scores = {pair: matching(pair) for pair in pairs}
    best = max(pairs, key=lambda pair: (scores[pair], -len(pair[0]) - len(pair[1])))
    candidates = zip((names, wanted), best, strict=True)
    fewest = min(sum(name.startswith(prefix) for name in group) for group, prefix in candidates)
    is_enough = scores[best] >= _LEAST_MATCHING * fewest and scores[best] > scores["", ""]
    return best if is_enough else ("", "")


def _prefixes(names: Collection[str], least: float) -> list[str]:
    # ``a.`` and ``a.b.`` of ``a.b.c``.
    starts = (accumulate(f"{part}." for part in name.split(".")[:-1]) for name in names)
    counts = Counter(chain.from_iterable(starts))
    return [prefix for prefix, count in counts.items() if count >= least * len(names)]


def mismatch_cause(
    loaded: Mapping[str, Tensor], expected: Mapping[str, Tensor], shapes: Collection[str]
) -> str:
    """Return why the weights do not fit the model, as far as names and shapes show it.

    ``shapes``: names of tensors in another shape.
    """
    missing, unknown = expected.keys() - loaded.keys(), loaded.keys() - expected.keys()
    common = loaded.keys() & expected.keys()
    if any("lora_" in name.lower() for name in unknown):
        return "it has adapters (LoRA); merge them into its layers first (PEFT: merge_and_unload)"
    if not common:
        return f"none of its {len(loaded)} names is the model's: {_libraries(loaded, expected)}"
    if not shapes and {_pattern(name) for name in missing | unknown} <= {_pattern(name) for name in common}:
        return f"the model has another depth: {_depths(loaded, expected)}"
    if shapes and all("pos" in name for name in shapes):
        return "its position embeddings are of another image or patch size"
    if shapes and all(_differs_in_channels(loaded[name], expected[name]) for name in shapes):
        return "it is for another number of input channels"
    if shapes and all(_other_classes(loaded[name], expected[name]) for name in shapes):
        return "it is for another number of tokens or classes"
    if shapes:
        return f"{len(shapes)} of {len(common)} common tensors have another size: another variant of it"
    if missing and all("running_" in name for name in missing):
        return "it lacks the running statistics of BatchNorm: save state_dict(), not parameters()"
    return f"{len(common)} of {len(expected)} names are the model's: another variant of it, or parts of it"


def _libraries(loaded: Iterable[str], expected: Iterable[str]) -> str:
    theirs, ours = _library(loaded), _library(expected)
    if theirs is None or theirs == ours:
        return "they are another architecture's"
    return f"they are those of {theirs}" + (f", the model's those of {ours}" if ours else "")


def _library(names: Iterable[str]) -> str | None:
    text = "\n".join(names)
    return next((whose for pattern, whose in _LIBRARIES.items() if re.search(pattern, text)), None)


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "N", name)


def _depths(loaded: Iterable[str], expected: Iterable[str]) -> str:
    """Return ``24 × blocks in the file, 12 × blocks in the model``: the first list of layers that differs."""
    theirs, ours = _layers(loaded), _layers(expected)
    name = next((name for name in {**theirs, **ours} if theirs[name] != ours[name]), "layers")
    return f"{theirs[name]} × {name} in the file, {ours[name]} × {name} in the model"


def _layers(names: Iterable[str]) -> Counter[str]:
    """Return list of layers → their number."""
    layers = {match[0] for name in names if (match := re.match(r"(.*?\.)?\w+\.\d+(?=\.)", name))}
    return Counter(layer.rpartition(".")[0] for layer in sorted(layers))


def _differs_in_channels(loaded: Tensor, expected: Tensor) -> bool:
    return (
        loaded.dim() == expected.dim() == 4
        and loaded.shape[:1] + loaded.shape[2:] == expected.shape[:1] + expected.shape[2:]
    )
