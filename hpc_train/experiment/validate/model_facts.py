"""Names and properties of models and data sets of timm, torchvision and smp, from a child and a cache.

``validate`` answers quickly on a login node because it imports none of these libraries. Where the child
fails or the cache can't be written, a name counts as unknown and is not reported: the ranks check it again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hpc_train.experiment.data_facts.built_in import MODELS
from hpc_train.experiment.validate.child_process import ChildError, one_child
from hpc_train.paths import cache_folder

_log = logging.getLogger(__name__)

#: From a cold network disk torch alone takes a minute.
CHILD_LIMIT_S = 180
#: The functions that list names and inspect models.
_NAMES = "hpc_train.training.models.names:list_names"
_FACTS = "hpc_train.training.strategies.model_facts:answer"
_TENSORS = "hpc_train.training.strategies.model_facts:tensors"
#: The providers whose models the child can build.
PROVIDERS = {name: facts for name, facts in MODELS.items() if facts.listed_by}
_PACKAGES = ("hpc-train", "torch", *(facts.package for facts in PROVIDERS.values()))
#: Increase it when the child's answers change: a checkout's version of hpc-train does not show that.
_ANSWERS = 7


def known_names(kind: str) -> list[str] | None:
    """Return the names of a kind (``timm``, ``torchvision``, ``smp``, ``smp_encoders``, ``datasets``,
    ``timm_optimizers``, or ``timm_optimizers/<name>``: its arguments); None if unavailable.
    """
    return _answer(None).get(kind)


def is_listed(name: str) -> bool:
    """Return True if the child can build a model of this name."""
    provider, _, rest = name.partition("/")
    return provider in PROVIDERS and rest.partition(".")[0] in (known_names(provider) or ())


def has_batchnorm(name: str, args: dict[str, Any]) -> bool | None:
    """Return True if a model of ``PROVIDERS`` has BatchNorm layers; None if unknown."""
    answer = facts(name, args).get("has_batchnorm")
    return answer if isinstance(answer, bool) else None


def args_refusal(name: str, args: dict[str, Any]) -> str | None:
    """Return the error for an argument that a model of ``PROVIDERS`` does not take; None without one."""
    key = name, frozenset(args)
    if key not in _refusals:  # once for a sweep of an argument's values
        refusal = facts(name, args).get("args_refusal")
        _refusals[key] = refusal if isinstance(refusal, str) else None
    return _refusals[key]


def facts(name: str, args: dict[str, Any], image_size: int | Sequence[int] | None = None) -> dict[str, Any]:
    """Return the report of ``strategies.model_facts`` on a model of ``PROVIDERS``; empty if unknown.

    ``image_size``: of a square, or height and width.
    """
    if name.partition("/")[0] not in PROVIDERS:
        return {}
    return _answer(json.dumps([name, args] if image_size is None else [name, args, image_size]))


def tensors(name: str, args: dict[str, Any]) -> tuple[dict[str, list[int]], frozenset[str]]:
    """Return the shapes of a model's tensors by name, and the names of its head; empty if unknown."""
    if not is_listed(name):
        return {}, frozenset()
    facts_of_model = _answer(json.dumps({"tensors": [name, args]}))
    return facts_of_model.get("tensors", {}), frozenset(facts_of_model.get("head", ()))


@contextmanager
def only_cached() -> Iterator[None]:
    """Within this context no child is started: facts that the cache lacks are unknown."""
    forget_answers()
    token = _may_start_child.set(False)
    try:
        yield
    finally:
        _may_start_child.reset(token)
        forget_answers()


def forget_answers() -> None:
    """Clear the cache of this process, not the one on disk."""
    _answer.cache_clear()
    _refusals.clear()


#: False within `only_cached`.
_may_start_child = ContextVar("may_start_child", default=True)
#: A model and the names of its arguments → ``args_refusal``.
_refusals: dict[tuple[str, frozenset[str]], str | None] = {}


@cache
def _answer(question: str | None) -> dict[str, Any]:
    """Return the facts about a model, or the answer of ``tensors``; if None, the available names."""
    versions = [f"{package} {_version(package)}" for package in _PACKAGES]
    digest = hashlib.sha256(json.dumps([_ANSWERS, versions, question]).encode()).hexdigest()
    file = cache_folder() / f"names-{digest[:20]}.json"
    answer = _read(file)
    if answer is None and not _may_start_child.get():
        return {}
    if answer is None:
        answer = _ask(question)
        if answer:
            _write(file, answer)
    if question is not None:
        return answer
    return {
        kind: names
        for kind, names in answer.items()
        if isinstance(names, list) and all(isinstance(name, str) for name in names)
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _read(file: Path) -> dict[str, Any] | None:
    try:
        answer = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None


def _ask(question: str | None) -> dict[str, Any]:
    function, arguments = (_NAMES, []) if question is None else (_FACTS, json.loads(question))
    if isinstance(arguments, dict):
        function, arguments = _TENSORS, arguments["tensors"]
    try:
        with one_child() as child:
            answer = child.call(function, *arguments, limit_s=CHILD_LIMIT_S)
    except ChildError as error:
        _log.warning("names could not be checked: %s", error)
        return {}
    return answer if isinstance(answer, dict) else {}


def _write(file: Path, answer: dict[str, Any]) -> None:
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(answer), encoding="utf-8")
        temporary.replace(file)
    except OSError:
        pass  # the next command computes it again
