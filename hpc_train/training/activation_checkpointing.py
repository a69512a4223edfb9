"""``activation_checkpointing:`` of the file: recomputes the activations of blocks in backward.

``training.train_state`` calls it before compiling and placing the model, so that the strategies' hooks and
the compiled code wrap the checkpointed forward.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hpc_train.errors import BadFileError
from hpc_train.training.strategies.batchnorm import only_updates_statistics
from hpc_train.training.strategies.buffers import persistent_places

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_KEPT_NAMES = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "linear",
    "_scaled_mm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
#: Operators whose results ``selective`` keeps; not every version of torch has all of them.
_KEPT = frozenset(
    getattr(torch.ops.aten, name).default for name in _KEPT_NAMES if hasattr(torch.ops.aten, name)
)

#: The block whose forward is about to begin: torch calls ``context_fn`` without passing the block.
_beginning: nn.Module | None = None


def checkpoint_activations(blocks: Sequence[nn.Module], setting: str) -> None:
    """Make ``blocks``, or every n-th of them, recompute their activations in backward, in place.

    Applies only in training and with gradients. Modules, their names and hooks do not change. Raises
    BadFileError if there are no blocks.
    """
    if setting == "off":
        return
    if not blocks:
        raise BadFileError(
            f"activation_checkpointing: {setting} needs repeated blocks, which this model does not have; "
            "write off, or give the model a method blocks()"
        )
    every = int(setting.removeprefix("every ")) if setting.startswith("every ") else 1
    for block in blocks[every - 1 :: every]:
        # An attribute of the instance, so that torch runs hooks and compiled code around it.
        block.forward = _Recomputed(block, block.forward, is_selective=setting == "selective")


@dataclass(eq=False)  # torch hashes it
class _Recomputed:
    """A block's forward under torch's checkpoint."""

    block: nn.Module
    plain: Callable[..., Any]
    is_selective: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> _Recomputed:
        """Bind the copy to the copied block, so that it uses that block's weights."""
        block, plain = copy.deepcopy((self.block, self.plain), memo)
        return _Recomputed(block, plain, is_selective=self.is_selective)

    def __call__(self, *args: Any, **keys: Any) -> Any:
        if not (self.block.training and torch.is_grad_enabled()):
            return self.plain(*args, **keys)
        global _beginning  # noqa: PLW0603
        before = None if torch.compiler.is_compiling() else _versions(args, keys)
        contexts = _contexts_selective if self.is_selective else _contexts_keeping_nothing
        _beginning = self.block
        outputs = checkpoint(self.plain, *args, use_reentrant=False, context_fn=contexts, **keys)
        _beginning = None
        if before is not None and before != _versions(args, keys):
            raise BadFileError(
                f"activation_checkpointing: a block of this model, {type(self.block).__name__}, changes its "
                "input in place (inplace=True, +=), so that its forward can't be run again; change the "
                "model, or write off"
            )
        return outputs


def _versions(args: tuple[Any, ...], keys: dict[str, Any]) -> list[int]:
    """Return each tensor's count of in-place changes. Compiled code may make them: it copies."""
    return [value._version for value in (*args, *keys.values()) if isinstance(value, Tensor)]


# torch calls these before each forward of a block, or while it compiles one. They are module functions
# without arguments because torch pickles them into the key of its cache, and recompiles if they differ.
def _contexts_keeping_nothing() -> Contexts:
    if TracingContext.try_get() is not None:
        # Compiled code changes buffers and draws random numbers only in the forward.
        return create_selective_checkpoint_contexts(_keep_nothing)
    return nullcontext(), _as_in_forward(_begun())


def _contexts_selective() -> Contexts:
    keeping, saved = create_selective_checkpoint_contexts(_selective)
    if TracingContext.try_get() is not None:
        return keeping, saved
    return keeping, _both(_as_in_forward(_begun()), saved)


# Stable keys for torch's compilation cache; change them with the policy.
_contexts_keeping_nothing.cache_hash = "hpc_train.keep_nothing.1"  # type: ignore[attr-defined]
_contexts_selective.cache_hash = "hpc_train.selective.1"  # type: ignore[attr-defined]


def _begun() -> nn.Module:
    assert _beginning is not None
    return _beginning


def _as_in_forward(block: nn.Module) -> AbstractContextManager[None]:
    """Return the context of the recomputation: random streams and buffers as they are now, restored on exit.

    Called before the first forward changes anything.

    ``checkpoint`` restores torch's own generators. BatchNorm's statistics are not read in training, so they
    need no copy.
    """
    streams = random.getstate(), np.random.get_state()
    # By place: a forward may put another tensor there.
    read = {
        (module, key): buffer.clone()
        for module, key, buffer in persistent_places(block)
        if not only_updates_statistics(module)
    }

    @contextmanager
    def again() -> Iterator[None]:
        after = random.getstate(), np.random.get_state()
        originals = _replace_buffers(block, read)
        _set_streams(*streams)
        try:
            yield
        finally:
            _set_streams(*after)
            for module, name, buffer in originals:
                module._buffers[name] = buffer

    return again()


def _set_streams(python: Any, numpy: Any) -> None:
    random.setstate(python)
    np.random.set_state(numpy)


def _replace_buffers(
    block: nn.Module, read: dict[tuple[nn.Module, str], Tensor]
) -> list[tuple[nn.Module, str, Tensor]]:
    """Give the block copies of its persistent buffers, from ``read`` or else from their current values.

    Copies, because autograd may hold the originals for a forward whose backward is still to come.
    Returns the original buffers.
    """
    originals = list(persistent_places(block))
    copies: dict[int, Tensor] = {}
    for module, key, buffer in originals:
        copies.setdefault(id(buffer), read.get((module, key), buffer).clone())
    for module, key, buffer in originals:
        module._buffers[key] = copies[id(buffer)]
    return originals


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer:
        try:
            with inner:
                yield
        except RuntimeError as error:
            if "has been mutated" in str(error):
                raise BadFileError(
                    "activation_checkpointing: selective keeps results that this model then changes in "
                    "place (inplace=True, +=); write blocks"
                ) from error
            raise


def _selective(context: Any, operation: Any, *args: Any, **keys: Any) -> CheckpointPolicy:
    is_kept = operation in _KEPT and not _draws(operation, args, keys)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operation: Any, args: tuple[Any, ...], keys: dict[str, Any]) -> bool:
    """Return True for attention with dropout: if it is not recomputed, later draws differ."""
    names = [argument.name for argument in operation._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **keys}.get("dropout_p", 0.0))


def _keep_nothing(context: Any, operation: Any, *args: Any, **keys: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE
