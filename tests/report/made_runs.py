"""Run folders as training leaves them, written without training: a sweep with preemptions."""

from __future__ import annotations

import io
import json
import math
import random
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from PIL import Image

from hpc_train.paths import RunPaths
from hpc_train.run.attempts import AttemptRecord
from hpc_train.run.create import create_run
from hpc_train.run.files import read_json
from hpc_train.run.run_status import RunStatus
from tests.run.runs import small_experiment, write_rows

START = datetime(2026, 11, 20, 9, 0, tzinfo=UTC).timestamp()
CLASSES = ("road", "sidewalk", "building", "vegetation", "sky", "person", "rider", "car", "bicycle", "train")
STEP_S = 0.9


def made_sweep(folder: Path, count: int = 6, steps: int = 600, every: int = 5) -> list[RunPaths]:
    """Create a sweep of ``count`` runs over the learning rate, the weight decay and the seed."""
    template = RunPaths(folder / ".template" / "run")
    assert create_run(template, small_experiment(name="sweep"), "run", steps)
    facts, resolved = read_json(template.run), json.loads(template.resolved.read_text())
    assert facts is not None
    return [_made_run(folder, number, steps, every, facts, resolved) for number in range(count)]


def _made_run(
    folder: Path, number: int, steps: int, every: int, facts: dict[str, Any], resolved: dict[str, Any]
) -> RunPaths:
    lr, decay = (0.01, 0.03, 0.1, 0.3)[number % 4], (0.0, 1e-4, 5e-4)[number // 4 % 3]
    paths = RunPaths(folder / "sweep" / f"{number:010x}")
    paths.folder.mkdir(parents=True)
    optimizer = resolved["optimization"]["optimizer"] | {"lr": lr, "weight_decay": decay}
    optimization = resolved["optimization"] | {"optimizer": optimizer}
    experiment = json.dumps(resolved | {"seed": number, "optimization": optimization}, indent=1)
    paths.resolved.write_text(experiment)
    paths.experiment.write_text(
        f"name: sweep\nseed: {number}\ntask: segmentation\nmodel: {{name: torchvision/fcn_resnet50}}\n"
        f"data: {{name: segmentation_folder, root: /data/streets}}\noptimization:\n  steps: {steps}\n"
        f"  global_batch_size: 64\n  micro_batch_size: 8\n"
        f"  optimizer: {{name: sgd, lr: {lr}, weight_decay: {decay}}}\n"
    )
    code = {"commit": "4c2f8a90d1e7b3562f0c9d84a1b7e6035d9c2f11", "dirty": number == 1}
    paths.run.write_text(json.dumps(facts | {"id": paths.folder.name, "code": code}))
    is_failed = number % 11 == 5
    last = steps * 2 // 3 if is_failed else steps
    rows, ends = metric_rows(number, last, steps, every, lr, decay)
    write_rows(paths, rows)
    reason = "rank 1 on n2: killed by SIGKILL; out of memory?" if is_failed else None
    state = "failed" if is_failed else "completed"
    paths.status.write_text(json.dumps(RunStatus(state, last, steps, 3.0, len(ends), reason).to_json()))
    for attempt, (begin, end, step, cause) in enumerate(ends, start=1):
        add_attempt(paths, attempt, begin, end, step, cause, number, reason)
    saved = paths.checkpoint(last).folder
    saved.mkdir(parents=True)
    if number < 12:
        _evaluation(paths, steps, number)
    return paths


def metric_rows(
    number: int, last: int, steps: int, every: int, lr: float, decay: float
) -> tuple[list[dict[str, Any]], list[tuple[float, float, int, str]]]:
    """Return the rows, and (begin, end, step, cause) of the attempts."""
    noise = random.Random(number)
    begin = START + 30.0 * (number // 4) + (900.0 + 60 * number if number > 3 else 0.0)
    third, half = steps // 3 // every * every, steps // 2 // every * every
    stops = {third: "preemption"} if number % 3 == 0 else {half: "crash"} if number % 5 == 1 else {}
    best = 0.78 - 0.08 * abs(math.log10(lr / 0.06)) + 20 * decay
    rows, ends = [], []
    attempt, time, started = 1, begin + 25.0, begin
    for step in range(every, last + 1, every):
        share = step / steps
        loss = 2.3 * math.exp(-5 * share) + (1 - best) * 0.9 + noise.gauss(0, 0.03) * (1.2 - share)
        wait_s = STEP_S * max(0.0, noise.gauss(0.05, 0.03))
        time += every * (STEP_S + wait_s)
        head = {"time": round(time, 3), "attempt": attempt, "step": step, "epoch": round(3 * share, 3)}
        rows.append(
            {"split": "train", **head, "lr": lr * 0.5 * (1 + math.cos(math.pi * share))}
            | {"step_s": STEP_S + wait_s, "data_wait_s": wait_s, "samples_per_s": 64 / (STEP_S + wait_s)}
            | {"peak_memory_gib": 21.4 + 0.2 * (number % 3), "loss": loss, "grad_norm": 2 * loss + 0.1}
        )
        if step % (10 * every) == 0:
            value = best * (1 - math.exp(-5 * share)) + noise.gauss(0, 0.006)
            ious = {
                f"iou_{name}": min(1.0, value * (1.25 - 0.07 * place)) for place, name in enumerate(CLASSES)
            }
            time += 6.0
            metrics = {"loss": 1.1 * (1 - value), "accuracy": value + 0.15, "miou": value}
            rows.append({"split": "val", **head, "time": round(time, 3)} | metrics | ious)
        if step in stops:
            ends.append((started, time + 12.0, step, stops[step]))
            started, attempt = time + 12.0 + 90.0 * (1 + number % 3), attempt + 1
            time = started + 25.0
    ends.append((started, time + 8.0, last, "completed" if last == steps else "crash"))
    return rows, ends


def add_attempt(
    paths: RunPaths, attempt: int, begin: float, end: float, step: int, cause: str, number: int,
    reason: str | None,
) -> None:  # fmt: skip
    times = {"begin": begin, "first_step": begin + 26.0}
    if cause == "preemption":
        times |= {"signal": end - 11.0, "saved": end - 4.0}
        reason = f"preempted at step {step}"
    if cause == "completed":
        reason = None
    record = AttemptRecord(
        attempt, _iso(begin), [], None, hosts=[f"n{1 + number % 4}"], ranks=8, end=_iso(end), cause=cause,
        reason=reason, exit_codes=[0], saved_step=step, checkpoint_stall_s=3.5,
        events={name: _iso(time) for name, time in times.items()},
    )  # fmt: skip
    folder = paths.attempt(attempt)
    folder.folder.mkdir(parents=True)
    folder.record.write_text(json.dumps({"version": 1} | asdict(record)))


def _iso(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")


def _evaluation(paths: RunPaths, step: int, number: int) -> None:
    folder = paths.evaluation(step)
    folder.mkdir(parents=True)
    noise = random.Random(number)
    lines = [",".join(["class", *CLASSES])]
    for row in range(len(CLASSES)):
        counts = [int(40 * noise.random() ** 3) for _ in CLASSES]
        counts[row] = 700 - 40 * row
        lines.append(",".join([CLASSES[row], *map(str, counts)]))
    (folder / "confusion.csv").write_text("\n".join(lines) + "\n")
    for place in range(2):
        (folder / f"prediction-{place}.png").write_bytes(png(96, 64, (number, place, 142)))


def png(width: int, height: int, color: tuple[int, int, int] = (0, 0, 0)) -> bytes:
    """Return a PNG file of one color."""
    content = io.BytesIO()
    Image.new("RGB", (width, height), color).save(content, "png")
    return content.getvalue()
