"""``hpc-train replay`` on the ranks: repeats steps of a run from one of its checkpoints and reports on them.

The ranks belong to a separate run folder, which contains ``replay.json``; the replayed run is only read. The
steps are those of training (``build.train_again``), watched by an observer. Rank r writes a line per step to
``replay-<r>.jsonl``: its micro-batches and its part of the gradients; rank 0 also the digests. For
``hpc-train bisect`` (``states`` in ``replay.json``) lines also have digests of tensors. For ``verify
--replay`` the same ranks repeat several ``stretches``, one after the other, and only compute digests.

At the first step with NaN or infinity the replay repeats the forward and backward of that step, with hooks on
all modules and without compilation, finds the module that computed it, and ends.
"""

from __future__ import annotations

import json
import pdb  # noqa: T100  (for --debugger)
import sys
import time
import traceback
from bdb import BdbQuit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from typing_extensions import override

from hpc_train.errors import ExitCode, NonFiniteError
from hpc_train.experiment.config.training_sections import ProfileConfig
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.run.digests import StepDigest, read_digests
from hpc_train.run.files import read_json
from hpc_train.run.rollbacks import skipped_windows
from hpc_train.training.build import free_memory, prepared_run, train_again
from hpc_train.training.checkpoint.control_group import ControlGroup
from hpc_train.training.checkpoint.saved_tensors import SavedState, read_into
from hpc_train.training.checkpoint.staging import Contents
from hpc_train.training.checkpoint.state import OPTIMIZER
from hpc_train.training.datasets.images import sample_path
from hpc_train.training.datasets.normalize import mean_and_std
from hpc_train.training.datasets.tokenization import Bytes, Decoder, decoder_of
from hpc_train.training.datasets.types import Batch, DataInfo, Tensors
from hpc_train.training.evaluation_outputs import images_in, png, rgb
from hpc_train.training.module_watch import NonFiniteSearch, OutputRanges
from hpc_train.training.rank import Rank
from hpc_train.training.state_digests import tensor_digest
from hpc_train.training.step import StepObserver, StepResult
from hpc_train.training.step_digests import StepDigests, TensorDigests
from hpc_train.training.strategies.base import Forward
from hpc_train.training.strategies.pieces import local_part
from hpc_train.training.train_state import TrainState
from hpc_train.training.training_run import Stretch, TrainingRun

#: Keys of ``replay.json`` that are true or false.
_EXTRAS = ("save_batch", "save_samples", "profile", "activations", "debugger")
#: Characters of a sample's text in the lines.
_TEXT_LENGTH = 200


class _ReplayOverError(Exception):
    """Ends the replay on all ranks after a step with NaN or infinity."""


@dataclass(frozen=True)
class _Request:
    """The content of ``replay.json``: the steps ``first`` to ``last`` are reported, those before compared.

    ``traced``: the steps of which each module's inputs, outputs and gradients get a digest. ``states``: the
    steps after which each tensor of the state gets one; None: without digests of tensors. ``stretches``:
    ``begin`` and ``last`` of those to repeat one after the other, in place of ``begin`` to ``last``.
    ``distances``: compare the state with the checkpoints of these steps, too. ``rolled_back``: the last step,
    if it is repeated as it was before the run rolled it back; its digest is not of that time.
    """

    run: RunPaths
    begin: int
    first: int
    last: int
    traced: range
    states: frozenset[int] | None
    save_batch: bool
    save_samples: bool
    profile: bool
    activations: bool
    debugger: bool
    distances: frozenset[int] = frozenset()
    stretches: tuple[tuple[int, int], ...] = ()
    rolled_back: int | None = None

    def parts(self) -> list[_Request]:
        """Return the requests to answer one after the other."""
        ends = self.stretches or [(self.begin, self.last)]
        return [replace(self, begin=begin, last=last) for begin, last in ends]

    @property
    def only_compares(self) -> bool:
        """True if no step is reported, only the digests of steps and states."""
        return bool(self.stretches)

    @property
    def profiled(self) -> ProfileConfig | None:
        """The steps to profile: those that are reported."""
        if not self.profile:
            return None
        return ProfileConfig.model_construct(
            after_steps=self.first - self.begin - 1, steps=self.last - self.first + 1
        )

    @classmethod
    def read(cls, paths: RunPaths) -> _Request:
        data = read_json(paths.replayed_steps) or {}
        begin, first, last = (int(data[key]) for key in ("begin", "first", "last"))
        trace_first, trace_last = data.get("trace") or (0, -1)
        states = data.get("states")
        return cls(
            RunPaths(Path(data["run"])),
            begin,
            first,
            last,
            range(trace_first, trace_last + 1),
            None if states is None else frozenset(states),
            distances=frozenset(data.get("distances") or ()),
            stretches=tuple((begin, end) for begin, end in data.get("stretches") or ()),
            rolled_back=data.get("rolled_back"),
            **{name: bool(data.get(name)) for name in _EXTRAS},
        )


def replay(rank: Rank) -> ExitCode:
    """Repeat the steps that ``replay.json`` names; write the ranks' results. Collective.

    Raises BadFileError if the checkpoint is of another model, StorageError if it is damaged.
    """
    request = _Request.read(rank.paths)
    skipped = skipped_windows(request.run, request.rolled_back)
    replayed = prepared_run(rank)
    is_done: bool | None = True
    with rank.paths.replay(rank.facts.rank).open("w") as file:
        for number, part in enumerate(request.parts()):
            began = time.monotonic()
            if number:
                free_memory(rank)

            def observe(run: TrainingRun, state: TrainState, part: _Request = part) -> StepObserver:
                return _Observer(run, state, part, file)

            stretch = Stretch(request.run, part.begin, part.last, skipped, observe, request.profiled)
            # The observer has reported the step; or the debugger was left.
            with suppress(_ReplayOverError, NonFiniteError, BdbQuit), _debugged(request.debugger):
                is_done = train_again(replayed, stretch)
            if request.only_compares:
                seconds = round(time.monotonic() - began, 3)
                print(json.dumps({"ended": part.last, "seconds": seconds}), file=file, flush=True)
            if is_done is False:
                break
    return ExitCode.TRY_AGAIN if is_done is False else ExitCode.DONE


@contextmanager
def _debugged(is_enabled: bool) -> Iterator[None]:
    """Open the debugger where an exception was raised, if it is enabled."""
    try:
        yield
    except (_ReplayOverError, NonFiniteError, BdbQuit):
        raise
    except Exception as error:
        if is_enabled:
            traceback.print_exception(error, limit=-1, file=sys.stdout)
            pdb.post_mortem(error.__traceback__)
        raise


class _Newest:
    """Keeps the digest of the newest step, in place of a file."""

    digest: StepDigest | None = None

    def append(self, digests: Sequence[StepDigest]) -> None:
        """Keep the last one."""
        self.digest = digests[-1]

    def sync(self) -> None:
        """Do nothing."""


class _Observer(StepObserver):
    """Writes one rank's results of each step; waits for the device."""

    def __init__(self, run: TrainingRun, state: TrainState, request: _Request, file: TextIO) -> None:
        rank, ranks = run.rank, run.rank.facts
        self._run = run
        self._state = state
        self._request = request
        self._file = file
        self._ranks = ControlGroup(ranks.rank, ranks.world_size, rank.group.control)
        self._computed = _Newest()
        self._digests = StepDigests(
            self._computed if rank.is_first else None, 0, owns_loss=state.strategy.owns_loss, every_steps=1
        )
        steps = request.begin + 1, request.last
        digests = read_digests(request.run.digests, *steps) if rank.is_first else ()
        self._recorded = {digest.step: digest for digest in digests if digest.step != request.rolled_back}
        #: Micro-batch number → its mean loss.
        self._losses: dict[int, Tensor] = {}
        #: Module → the sum of its squared gradients in this rank's part.
        self._squares: dict[str, float] = {}
        self._non_finite: dict[str, Any] | None = None
        self._has_ended = False
        self._search: NonFiniteSearch | None = None
        self._ranges = OutputRanges(state.model)
        info = run.source.info
        #: Of sequences.
        self._decoder = None if info.sequence_length is None else _decoder(info)
        self._tensors: TensorDigests | None = None
        if request.states is not None:
            watches = not rank.experiment.compile.enabled
            self._tensors = TensorDigests(
                state,
                request.begin,
                request.traced,
                request.states,
                watches=watches,
                every_state=bool(request.traced),
            )
            print(json.dumps({"step": request.begin} | self._tensors.of_state(request.begin)), file=file)

    @override
    def step_begun(self, step: int, batches: Sequence[Batch], forward: Forward) -> None:
        if step + 1 < self._request.first:
            return
        if self._request.activations:
            self._ranges.register()
        if self._request.debugger:
            print(f"step {step + 1} begins; `batches` are its micro-batches, `state.model` is the model")
            pdb.Pdb(nosigint=True).set_trace(sys._getframe(1))

    @override
    def loss_computed(self, batch: Batch, loss: Tensor) -> None:
        if self._request.only_compares:
            return
        if batch.weight > 0:
            self._losses[batch.number] = loss.detach().clone()
        if self._search is not None:
            self._search.end_batch(batch.number)
            return
        self._ranges.end_batch(batch.number)
        if self._tensors is not None:
            self._tensors.end_forward(batch.number)

    @override
    def gradients_ready(self, step: int, batches: Sequence[Batch], forward: Forward) -> None:
        self._ranges.remove()
        if self._request.only_compares:
            return
        if self._tensors is not None:
            self._tensors.end_backward()
        self._squares = _squares(self._state)
        self._has_ended = self._ranks.total([int(self._is_non_finite())])[0] > 0
        if self._has_ended:
            losses = dict(self._losses)
            self._non_finite = self._find(batches, forward)
            self._losses = losses

    def _is_non_finite(self) -> bool:
        numbers = [float(loss) for loss in self._losses.values()]
        if not self._run.rank.precision.needs_scaler:  # its scale makes gradients infinite on purpose
            numbers += self._squares.values()
        return not torch.tensor([0.0, *numbers], dtype=torch.float64).isfinite().all()

    def _find(self, batches: Sequence[Batch], forward: Forward) -> dict[str, Any] | None:
        """Repeat forward and backward and return where this rank computed NaN first. Collective."""
        parameters = self._state.strategy.optimized().values()
        gradients = [None if value.grad is None else value.grad.clone() for value in parameters]
        with NonFiniteSearch(self._state.model) as self._search, torch.compiler.set_stance("force_eager"):
            self._state.strategy.accumulate(batches, forward)
        place = self._search.place
        self._search = None
        for value, gradient in zip(self._state.strategy.optimized().values(), gradients, strict=True):
            value.grad = gradient
        if place is not None:
            return place
        bad_losses = [number for number, loss in self._losses.items() if not loss.isfinite()]
        if bad_losses:
            return {"where": "loss", "micro_batch": min(bad_losses), "module": None}
        bad = [module for module, square in self._squares.items() if not square < float("inf")]
        return {"where": "backward", "micro_batch": None, "module": bad[-1]} if bad else None

    @override
    def step_done(self, step: int, batches: Sequence[Batch], result: StepResult) -> None:
        self._digests.step_done(step, batches, result)
        self._digests.drain(wait=True)
        number = step + 1
        line: dict[str, Any] = {"step": number}
        if self._run.rank.is_first:
            line |= {
                "digest": _as_json(self._computed.digest),
                "recorded": _as_json(self._recorded.get(number)),
            }
        is_reported = number >= self._request.first and not self._request.only_compares
        if is_reported or self._has_ended:
            line |= {
                "learning_rate": result.learning_rate,
                "micro_batches": [self._micro_batch(batch) for batch in batches if batch.weight > 0],
                "squares": self._squares,
                "non_finite": self._non_finite,
                "ranges": self._ranges.taken(),
            }
        if self._tensors is not None:
            line |= self._tensors.of_state(number) | self._tensors.of_step(number)
        if number in self._request.distances:
            line["distances"] = _distances(self._state, self._request.run.checkpoint(number))
        print(json.dumps(line), file=self._file, flush=True)
        if number == self._request.first or self._has_ended:
            owned = [batch for batch in batches if batch.weight > 0 and self._state.strategy.owns_loss]
            if self._request.save_batch:
                self._save(owned)
            if self._request.save_samples:
                self._save_samples(owned)
        self._losses = {}
        if self._has_ended:
            raise _ReplayOverError

    def _micro_batch(self, batch: Batch) -> dict[str, Any]:
        loss = self._losses.get(batch.number)
        files = [sample_path(self._run.source.train, index) for index in batch.indices]
        digests = {}
        if batch.step + 1 in self._request.traced:
            parts = {"inputs": batch.inputs, "targets": batch.targets}
            digests = {part: tensor_digest(value for _, value in _named(part, parts[part])) for part in parts}
        return digests | {
            "number": batch.number,
            "loss": None if loss is None else float(loss),
            "samples": batch.indices,
            "files": [str(file) for file in files if file is not None],
            "texts": [text[:_TEXT_LENGTH] for text in self._texts(batch)],
        }

    def _texts(self, batch: Batch) -> list[str]:
        """Return the decoded tokens of each sample; none if they can't be decoded."""
        if self._decoder is None or not isinstance(batch.inputs, Tensor):
            return []
        return [self._decoder.decode(tokens) for tokens in batch.inputs.tolist()]

    def _save_samples(self, batches: Sequence[Batch]) -> None:
        """Write this rank's images as PNG files, or its texts, named by micro-batch, place and sample."""
        folder, info = self._run.rank.paths.replayed_samples, self._run.source.info
        mean, std = mean_and_std(info, self._run.rank.experiment.data)
        for batch in batches:
            contents = [text.encode(errors="replace") for text in self._texts(batch)]
            suffix = ".txt"
            if info.sequence_length is None:
                images = next(images_in(batch.inputs), ())
                contents = [png(Image.fromarray(rgb(image, mean, std))) for image in images]
                suffix = ".png"
            for place, (index, content) in enumerate(zip(batch.indices, contents, strict=False)):
                folder.mkdir(exist_ok=True)
                name = f"micro-batch-{batch.number}.{place}-sample-{index}{suffix}"
                (folder / name).write_bytes(content)

    def _save(self, batches: Sequence[Batch]) -> None:
        """Write the micro-batches of all ranks into rank 0's file."""
        paths, rank = self._run.rank.paths, self._run.rank.facts.rank
        tensors: dict[str, Tensor] = {}
        for batch in batches:
            name = f"micro_batch.{batch.number}"
            tensors[f"{name}.samples"] = torch.tensor(batch.indices, dtype=torch.int64)
            for part, value in (("inputs", batch.inputs), ("targets", batch.targets)):
                tensors |= dict(_named(f"{name}.{part}", value))
        save_file(tensors, paths.replayed_batch(rank))
        self._ranks.total([1])  # all have written
        if self._run.rank.is_first:
            for other in range(1, self._run.rank.facts.world_size):
                tensors |= load_file(paths.replayed_batch(other))
            save_file(tensors, paths.replayed_batch(0))


def _as_json(digest: StepDigest | None) -> dict[str, Any] | None:
    if digest is None:
        return None
    numbers = {"loss": digest.loss, "grad_norm": digest.grad_norm, "attempt": digest.attempt}
    return {"samples": f"{digest.samples:016x}"} | numbers


def _named(name: str, value: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a structure by name, such as ``inputs.image`` or ``targets.0``."""
    if isinstance(value, Tensor):
        yield name, value.detach().cpu().clone(memory_format=torch.contiguous_format)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _named(f"{name}.{key}", part)
    else:
        for place, part in enumerate(value or ()):
            yield from _named(f"{name}.{place}", part)


def _decoder(info: DataInfo) -> Decoder | None:
    is_known = info.class_names or info.tokenizer or info.num_classes <= Bytes.vocabulary_size
    return decoder_of(info) if is_known else None


@torch.no_grad()
def _squares(state: TrainState) -> dict[str, float]:
    """Return module → the sum of its squared gradients in the parts that this rank alone counts."""
    tensors: dict[str, list[Tensor]] = {}
    for name, parameter in state.strategy.optimized().items():
        if parameter.grad is None:
            continue
        module = name.rpartition(".")[0]
        pieces = state.strategy.pieces(parameter.grad, parameter)
        local = [piece.local for piece in pieces if piece.is_writer and piece.local.numel()]
        tensors.setdefault(module, []).extend(local)
    return {
        module: float(sum(part.double().square().sum() for part in parts))
        for module, parts in tensors.items()
    }


@torch.no_grad()
def _distances(state: TrainState, checkpoint: CheckpointPaths) -> dict[str, tuple[float, float]]:
    """Return weight → the sums of its squared differences from the saved one, and of the saved one's squares.

    Of the parts that this rank alone counts; any ranks may have saved the checkpoint.
    """
    saved = SavedState.read(checkpoint)
    sums: dict[str, tuple[float, float]] = {}
    for name, pieces in Contents.of(state.state, state.strategy, {}).pieces.items():
        if name not in saved.tensors or name.startswith(OPTIMIZER):
            continue
        for piece in pieces:
            if piece.is_writer and piece.local.numel() and piece.local.is_floating_point():
                now = local_part(piece.local).cpu()
                then = torch.empty_like(now, memory_format=torch.contiguous_format)
                read_into(checkpoint, saved.tensors, {name: [replace(piece, local=then)]})
                squares = (now.double() - then.double()).square().sum(), then.double().square().sum()
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + float(squares[0]), before[1] + float(squares[1])
    return sums
