"""Samples that ranks could not read: ``rank-<r>.bad_samples.jsonl`` of each attempt, one line per sample.

Written by ``datasets.skipping``; commands read it too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from hpc_train.errors import counted
from hpc_train.paths import AttemptPaths, RunPaths
from hpc_train.run.checkpoints import INHERITED
from hpc_train.run.file_shapes import decoded
from hpc_train.run.files import UnreadableFileError, open_regular, read_text

Part = Literal["train", "val"]
#: Identifies a bad sample.
SampleKey = tuple[Part, int]


@dataclass(frozen=True)
class BadSample:
    """A sample that can't be read. ``name`` is its file, or ``sample 5`` if it has none."""

    split: Part
    index: int
    name: str
    why: str

    @property
    def key(self) -> SampleKey:
        """Identifies the sample in all attempts: its split and its index there."""
        return self.split, self.index

    @property
    def title(self) -> str:
        """The sample's index and file, as text."""
        number = f"sample {self.index}"
        title = number if self.name == number else f"{number} ({self.name})"
        return f"validation {title}" if self.split == "val" else title

    def __str__(self) -> str:
        return f"{self.title}: {self.why}"


def append(file: Path, samples: Iterable[BadSample]) -> None:
    """Append one line per sample. Raises OSError if the disk rejects it, else like ``open_regular``."""
    lines = "".join(json.dumps(asdict(sample)) + "\n" for sample in samples)
    with open_regular(file, "ab") as out:
        out.write(lines.encode())


def of_attempt(attempt: AttemptPaths) -> dict[SampleKey, BadSample]:
    """Return the samples that the ranks of an attempt reported, ordered by rank."""
    samples: dict[SampleKey, BadSample] = {}
    for _, file in sorted(attempt.files_of_ranks(".bad_samples.jsonl").items()):
        for sample in _read(file):
            samples.setdefault(sample.key, sample)
    return samples


def all_known(paths: RunPaths) -> dict[SampleKey, BadSample]:
    """Return the bad samples reported by any rank of any attempt, in the order of attempts."""
    return of_attempts(paths, paths.attempt_folders())


def of_attempts(paths: RunPaths, attempts: Iterable[AttemptPaths]) -> dict[SampleKey, BadSample]:
    """Return the samples of these attempts, after those of the run that this one extends."""
    samples: dict[SampleKey, BadSample] = {}
    for attempt in (paths.attempt(INHERITED), *attempts):
        samples |= {key: sample for key, sample in of_attempt(attempt).items() if key not in samples}
    return samples


def in_words(paths: RunPaths) -> str | None:
    """Return the first sample that the run could not read, and how many more there are; None without one."""
    samples = list(all_known(paths).values())
    if not samples:
        return None
    more = f" and {counted(len(samples) - 1, 'more sample')}" if len(samples) > 1 else ""
    return f"{samples[0]}{more}"


def _read(file: Path) -> Iterator[BadSample]:
    """Yield a file's samples as far as it can be read; an incomplete line of a killed rank is ignored."""
    with suppress(OSError, UnreadableFileError):
        for line in read_text(file, errors="replace").splitlines():
            with suppress(ValueError, RecursionError):
                if (sample := decoded(BadSample, json.loads(line))) is not None:
                    yield sample
