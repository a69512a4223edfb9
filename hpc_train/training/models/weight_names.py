"""Matches the names in a file of weights to a model's, and infers why they do not fit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import accumulate

from torch import Tensor

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
    counts = Counter(prefix for name in names for prefix in _starts(name))
    return [prefix for prefix, count in counts.items() if count >= least * len(names)]


def _starts(name: str) -> Iterator[str]:
    """Yield ``a.`` and ``a.b.`` of ``a.b.c``."""
    return accumulate(f"{part}." for part in name.split(".")[:-1])


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
