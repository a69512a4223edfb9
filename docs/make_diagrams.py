"""Draws docs/diagrams/, the pictures of the pages that explain: ``python -m docs.make_diagrams``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from docs.drawing import Drawing
from docs.pipeline_order import Operation, timed

FOLDER = Path(__file__).with_name("diagrams")
_KINDS = ("blue", "green", "amber", "pink")
#: Lane, left end, width, kind of box, words.
_Event = tuple[str, float, float, str, str]


def _legend(drawing: Drawing, x: float, y: float, kind: str, words: str) -> None:
    """Draw a square and what its color stands for."""
    drawing.box(x, y, 16, 16, kind)
    drawing.text(x + 24, y + 13, words, anchor="start", kind="faint")


def _timeline(drawing: Drawing, right: float, lanes: Mapping[str, float], events: Iterable[_Event]) -> None:
    """Draw each lane's name, which ends at ``right``, and in the lanes the events."""
    for name, y in lanes.items():
        drawing.text(right, y + 18, name, anchor="end", kind="faint")
    for lane, x, width, kind, words in events:
        drawing.box(x, lanes[lane], width, 28, kind, words)


def micro_batches() -> Drawing:
    """The micro-batches of a step on one, two and three ranks."""
    drawing = Drawing(
        "One step of eight micro-batches on one, two and three ranks",
        "On one rank: micro-batches 0 to 7. On two: rank 0 has 0, 2, 4, 6 and rank 1 has 1, 3, 5, 7. On "
        "three: rank 0 has 0, 3, 6, rank 1 has 1, 4, 7, and rank 2 has 2, 5 and a spare slot.",
        620,
        304,
    )
    top = 34
    for ranks in (1, 2, 3):
        drawing.text(16, top, f"R = {ranks}", anchor="start")
        slots = -(-8 // ranks)
        for rank in range(ranks):
            y = top - 16 + 26 * rank
            drawing.text(128, y + 16, f"rank {rank}", anchor="end", kind="faint")
            for slot in range(slots):
                number = rank + ranks * slot
                kind, words = (_KINDS[rank], str(number)) if number < 8 else ("empty", "spare")
                drawing.box(140 + 52 * slot, y, 48, 22, kind, words)
        drawing.text(612, top, f"{slots} slots", anchor="end", kind="faint")
        top += 26 * ranks + 22
    drawing.arrow(140, top - 6, 552, top - 6)
    drawing.text(346, top + 14, "time", kind="faint")
    drawing.text(310, top + 36, "then one all-reduce: each rank has the mean gradient of all 8 micro-batches")
    return drawing


def ring_all_reduce() -> Drawing:
    """The two halves of a ring all-reduce of four ranks."""
    drawing = Drawing(
        "Ring all-reduce on four ranks",
        "Each rank has a vector of four parts. After three steps of reduce-scatter, in which each rank "
        "sends one part to the next, each rank has the sum of one part. After three more steps, "
        "all-gather, each rank has all sums.",
        620,
        214,
    )
    stages = ("own gradients", "after reduce-scatter", "after all-gather")
    for column, heading in enumerate(stages):
        x = 76 + 188 * column
        drawing.text(x + 76, 26, heading)
        for rank in range(4):
            y = 40 + 32 * rank
            if column == 0:
                drawing.text(64, y + 18, f"rank {rank}", anchor="end", kind="faint")
            for part in range(4):
                is_sum = column == 2 or (column == 1 and part == (rank + 1) % 4)
                kind = _KINDS[part] if column == 0 or is_sum else "empty"
                drawing.box(
                    x + 38 * part, y, 36, 26, kind, f"Σ{part}" if is_sum else str(part) * (column == 0)
                )
        if column < 2:
            drawing.arrow(x + 156, 102, x + 182, 102)
    for x in (246, 434):
        drawing.text(x, 192, "3 sends of ¼", kind="faint")
    return drawing


def sharding_memory() -> Drawing:
    """Bytes per parameter on each of four ranks."""
    drawing = Drawing(
        "Bytes per parameter on each of four ranks, AdamW in fp32",
        "ddp: 4 for parameters, 4 for gradients, 8 for the optimizer's state, 16 in all. zero1: 4, 4, "
        "2, 10 in all. zero2: 5, 1, 2, 8 in all. fsdp: 1, 1, 2, 4 in all, and one whole block.",
        620,
        210,
    )
    parts = {
        "ddp": (4.0, 4.0, 8.0),
        "zero1": (4.0, 4.0, 2.0),
        "zero2": (5.0, 1.0, 2.0),
        "fsdp": (1.0, 1.0, 2.0),
    }
    for row, (strategy, sizes) in enumerate(parts.items()):
        x, y = 74.0, 18 + 34 * row
        drawing.text(64, y + 17, strategy, anchor="end")
        for size, kind in zip(sizes, _KINDS, strict=False):
            drawing.box(x, y, 30 * size - 2, 26, kind, f"{size:g}")
            x += 30 * size
        drawing.text(x + 8, y + 17, f"{sum(sizes):g}", anchor="start", kind="faint")
    for x, kind, words in zip(
        (74, 224, 374), _KINDS, ("parameters", "gradients", "optimizer state"), strict=False
    ):
        _legend(drawing, x, 166, kind, words)
    return drawing


def tensor_parallel() -> Drawing:
    """An MLP whose two linear layers are shared by two ranks."""
    drawing = Drawing(
        "Tensor parallelism: an MLP on two ranks",
        "The input X is on both ranks. The first weight is split by columns: rank 0 computes X A0, rank "
        "1 X A1, each with its own half of the width and its own activation function. The second weight "
        "is split by rows: rank 0 computes a partial sum with B0, rank 1 with B1. An all-reduce adds "
        "the two.",
        620,
        206,
    )
    for rank in range(2):
        y = 44 + 76 * rank
        kind = _KINDS[rank]
        drawing.text(16, y + 24, f"rank {rank}", anchor="start", kind="faint")
        for x, width, what, words in (
            (76, 44, "empty", "X"),
            (148, 76, kind, f"A{rank}"),
            (252, 76, "empty", "GELU"),
            (356, 76, kind, f"B{rank}"),
        ):
            drawing.box(x, y, width, 40, what, words)
        for x in (120, 224, 328):
            drawing.arrow(x + 2, y + 20, x + 26, y + 20)
        drawing.arrow(434, y + 20, 466, 102 + 12 * (rank * 2 - 1))
    drawing.box(470, 84, 92, 36, "amber", "all-reduce")
    drawing.arrow(564, 102, 588, 102)
    drawing.text(602, 106, "Y")
    for x, words in ((186, "columns"), (394, "rows")):
        drawing.text(x, 30, words, kind="faint")
    drawing.text(310, 192, "no communication between the two layers", kind="faint")
    return drawing


def pipeline_schedules() -> Drawing:
    """The schedules of four ranks and eight micro-batches."""
    drawing = Drawing(
        "Pipeline schedules: four ranks, eight micro-batches",
        "Rows are ranks, time goes to the right; forward passes are one unit long, backward passes two. "
        "gpipe: all forward passes, then all backward passes. 1f1b: after a warm-up each rank "
        "alternates; the step takes as long. interleaved, with two stages per rank: the ranks wait half "
        "as long.",
        620,
        424,
    )
    top, unit = 34.0, 16.0
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        operations = timed(name, ranks=4, slots=8, chunks=chunks)
        end = max(operation.end for operation in operations)
        idle = 1 - sum(operation.end - operation.start for operation in operations) / (4 * end)
        label = f"{name}: ranks wait {100 * idle:.0f} % of the step"
        drawing.text(72, top - 8, label, anchor="start")
        for rank in range(4):
            y = top + 22 * rank
            drawing.text(64, y + 14, f"rank {rank}", anchor="end", kind="faint")
            drawing.box(72, y, unit * end, 20, "empty")
            for operation in operations:
                if operation.rank == rank:
                    _draw(drawing, operation, 72, y, unit)
        top += 4 * 22 + 36
    for x, kind, words in (
        (72, "blue", "forward"),
        (172, "green", "backward"),
        (284, "pink", "forward, second stage"),
        (478, "amber", "backward of it"),
    ):
        _legend(drawing, x, top - 16, kind, words)
    return drawing


def _draw(drawing: Drawing, operation: Operation, x: float, y: float, unit: float) -> None:
    kinds = ("green", "amber") if operation.is_backward else ("blue", "pink")
    width = unit * (operation.end - operation.start) - 1
    drawing.box(x + unit * operation.start, y + 1, width, 18, kinds[operation.chunk], str(operation.slot))


def float_formats() -> Drawing:
    """The bits of each dtype."""
    formats = {
        "fp32": (1, 8, 23), "tf32": (1, 8, 10), "bf16": (1, 8, 7), "fp16": (1, 5, 10), "fp8 e4m3": (1, 4, 3),
        "fp8 e5m2": (1, 5, 2),
    }  # fmt: skip
    drawing = Drawing(
        "Bits of each precision",
        "; ".join(f"{name}: {s} sign, {e} exponent, {m} mantissa" for name, (s, e, m) in formats.items())
        + ".",
        620,
        234,
    )
    for row, (name, parts) in enumerate(formats.items()):
        x, y = 92.0, 16 + 30 * row
        drawing.text(84, y + 16, name, anchor="end")
        for bits, kind in zip(parts, _KINDS, strict=False):
            drawing.box(x, y, 16 * bits - 1, 22, kind, str(bits))
            x += 16 * bits
    for x, kind, words in zip(
        (92, 242, 392), _KINDS, ("sign", "exponent: range", "mantissa: digits"), strict=False
    ):
        _legend(drawing, x, 200, kind, words)
    return drawing


def position() -> Drawing:
    """From the step to the samples."""
    drawing = Drawing(
        "From the number of a step to its samples",
        "Each epoch is a permutation of the samples, computed from seed and epoch, and cut into steps "
        "of G samples. Step 5 of epochs of 4 steps is the second window of epoch 1. Its samples are "
        "dealt to the ranks as micro-batches.",
        620,
        232,
    )
    for epoch in range(2):
        y = 20 + 44 * epoch
        drawing.text(16, y + 18, f"epoch {epoch}", anchor="start", kind="faint")
        for window in range(4):
            number = 4 * epoch + window
            drawing.box(84 + 100 * window, y, 96, 28, "amber" if number == 5 else "empty", f"step {number}")
        drawing.box(484, y, 36, 28, "empty")
        drawing.text(526, y + 18, "dropped", anchor="start", kind="faint")
    drawing.arrow(232, 94, 232, 118)
    drawing.text(246, 112, "slice 1 of the permutation of (seed, epoch 1)", anchor="start", kind="faint")
    for number in range(4):
        kind = _KINDS[number % 2]
        drawing.box(84 + 100 * number, 124, 96, 28, kind, f"micro-batch {number}")
    for rank in range(2):
        _legend(drawing, 84, 172 + 24 * rank, _KINDS[rank], f"rank {rank}")
    drawing.text(200, 186, "random numbers of a forward: (seed, step, micro-batch)", anchor="start")
    drawing.text(200, 210, "of a sample's augmentation: (seed, epoch, sample)", anchor="start")
    return drawing


def resume_timeline() -> Drawing:
    """From the signal of a preemption to the next step."""
    drawing = Drawing(
        "From a preemption to the next step",
        "Slurm sends SIGTERM to the ranks during step 120. Each rank sets a flag; the flags are added "
        "up while step 120 is computed; all ranks stop after it, save a checkpoint and exit with code "
        "75. The batch script records the reason, requeues the job and sets its start to five seconds "
        "from now. Slurm starts the job again, the batch script claims attempt 2, and the ranks load "
        "the checkpoint and train step 121.",
        620,
        268,
    )
    lanes = {"Slurm": 48, "batch script": 112, "ranks": 176}
    for y in lanes.values():
        drawing.line(100, y + 14, 606, y + 14, is_dashed=True)
    events = (
        ("ranks", 104, 60, "green", "119"),
        ("ranks", 166, 60, "green", "120"),
        ("ranks", 228, 62, "amber", "save"),
        ("batch script", 294, 62, "blue", "record"),
        ("Slurm", 360, 70, "empty", "queue"),
        ("batch script", 434, 54, "blue", "claim"),
        ("ranks", 490, 52, "amber", "load"),
        ("ranks", 544, 60, "green", "121"),
    )
    _timeline(drawing, 92, lanes, events)
    drawing.arrow(190, 56, 190, 174)
    drawing.text(196, 42, "SIGTERM", kind="text")
    drawing.arrow(292, 190, 312, 142)
    drawing.text(318, 168, "exit 75", anchor="start")
    drawing.arrow(348, 110, 374, 78)
    drawing.text(330, 92, "requeue", anchor="end")
    drawing.arrow(424, 78, 446, 110)
    drawing.arrow(478, 142, 498, 174)
    for x, words in ((226, "all ranks agree: stop here"), (520, "attempt 2")):
        drawing.text(x, 228, words, kind="faint")
    drawing.arrow(226, 216, 226, 206)
    drawing.text(310, 254, "the steps are those of an uninterrupted run", kind="faint")
    return drawing


def async_checkpoint() -> Drawing:
    """What happens during an asynchronous save."""
    drawing = Drawing(
        "Asynchronous checkpointing",
        "After step 100 a save begins. The training thread starts forward and backward of step 101 at "
        "once. Meanwhile the state is copied into buffers. The optimizer step of 101 changes the "
        "weights, so it waits until the copy is complete: the stall. A thread writes and hashes the "
        "copy during steps 101 to 103, then commits.",
        620,
        226,
    )
    lanes = {"training": 36, "copy": 86, "write": 136}
    events = (
        ("training", 84, 92, "green", "step 100"),
        ("training", 180, 96, "green", "101: fwd, bwd"),
        ("training", 278, 34, "pink", "stall"),
        ("training", 314, 36, "green", "opt."),
        ("training", 352, 124, "green", "step 102"),
        ("training", 478, 124, "green", "step 103"),
        ("copy", 180, 132, "blue", "state after 100"),
        ("write", 314, 196, "amber", "shard files, hashes"),
        ("write", 512, 66, "amber", "commit"),
    )
    _timeline(drawing, 76, lanes, events)
    drawing.line(178, 24, 178, 176, is_dashed=True)
    drawing.line(580, 130, 580, 176, is_dashed=True)
    drawing.arrow(330, 182, 182, 182)
    drawing.arrow(420, 182, 578, 182)
    drawing.text(376, 187, "save_s")
    drawing.text(310, 212, "checkpoint_stall_s: the sum of all stalls", kind="faint")
    return drawing


DIAGRAMS: tuple[Callable[[], Drawing], ...] = (
    micro_batches,
    ring_all_reduce,
    sharding_memory,
    tensor_parallel,
    pipeline_schedules,
    float_formats,
    position,
    resume_timeline,
    async_checkpoint,
)


def drawn() -> Iterator[tuple[Path, Drawing]]:
    """Yield the file and the drawing of each diagram."""
    for diagram in DIAGRAMS:
        yield FOLDER / f"{diagram.__name__}.svg", diagram()


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for path, drawing in drawn():
        path.write_text(str(drawing), encoding="utf-8")


if __name__ == "__main__":
    main()
