"""Samples that can't be read, where ``data.on_bad_sample`` says ``skip``: what stands in, and who is told.

Readers (in the loader's workers) find the stand-in and send what was bad along with the batch; the rank notes
it here when it takes that batch, so that what was read ahead and never used counts for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from hpc_train.datasets.random_numbers import hash_words
from hpc_train.errors import BadFileError, printable
from hpc_train.paths import RunPaths
from hpc_train.run_folder.bad_samples import BadSample, SampleKey, all_known, append, of_attempt

#: Stand-ins that are tried for one sample. So many bad in a row: the data are not there at all.
TRIES = 100
_SHOWN = 5
_log = logging.getLogger(__name__)


def stand_ins(seed: int, epoch: int, index: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield (hash, index) of the samples to try in the place of sample ``index`` of ``count``.

    A pure function: any rank, worker or attempt tries the same ones in the same order. The hash seeds the
    generators that reading the sample may draw from.
    """
    for number in range(TRIES):
        word = hash_words(seed, epoch, index, number)
        if word % count != index:
            yield word, word % count


class BadSamples:
    """What one rank of one attempt knows of bad samples; each is logged, written down and counted once."""

    def __init__(self, paths: RunPaths, attempt: int, rank: int) -> None:
        self._attempt = paths.attempt(attempt)
        self._file = self._attempt.bad_samples(rank)
        earlier = [folder for folder in paths.attempt_folders() if folder.number < attempt]
        self._earlier: set[SampleKey] = set().union(*(of_attempt(folder) for folder in earlier))
        self._seen: set[SampleKey] = set()
        self._count = 0

    @property
    def count(self) -> int:
        """Different samples that this rank was the first to name, in any attempt: ranks' counts add up."""
        return self._count

    @property
    def earlier(self) -> int:
        """Different samples that earlier attempts named."""
        return len(self._earlier)

    def note(self, samples: Iterable[BadSample]) -> None:
        """Name those that nobody named before."""
        new = {s.key: s for s in samples if s.key not in self._seen and s.key not in self._earlier}
        if not new:
            return
        self._seen |= new.keys()
        # In a later epoch another rank meets the same sample; it has been named by now.
        named = of_attempt(self._attempt)
        own = [sample for key, sample in new.items() if key not in named]
        self._count += len(own)
        for sample in own:
            _log.warning("data: left out, since it can't be read: %s", printable(str(sample)))
        try:
            append(self._file, own)
        except OSError as error:  # a full disk is the checkpoints' to report
            _log.warning("%s can't be written: %s", self._file, error)


def too_many(paths: RunPaths, at_most: int) -> BadFileError:
    """Return the error of a run that met more bad samples than ``data.max_bad_samples`` allows."""
    known = list(all_known(paths).values())
    named = [printable(f"  {sample}") for sample in known[:_SHOWN]]
    if len(known) > _SHOWN:
        named.append(f"  … and {len(known) - _SHOWN} more, in attempts/*/rank-*.bad_samples.jsonl")
    headline = (
        f"data.max_bad_samples: more than {at_most} samples can't be read; mend or remove them, or write a "
        f"greater number than {max(at_most, len(known) - 1)}:"
    )
    return BadFileError([headline, *named])
