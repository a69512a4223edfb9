"""Samples that can't be read, with ``data.on_bad_sample: skip``: their replacements and their reports.

Readers (in the loader processes) choose the replacement and send the bad sample along with the batch; the
rank records it here when it uses that batch, so that samples that were prefetched but never used don't count.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from hpc_train.errors import BadFileError, printable
from hpc_train.paths import RunPaths
from hpc_train.run.bad_samples import BadSample, SampleKey, all_known, append, of_attempt, of_attempts
from hpc_train.run.files import UnreadableFileError
from hpc_train.training.datasets.random_numbers import hash_words

#: Maximum number of replacements to try for one sample. If all are bad, the data are not there at all.
TRIES = 100
_SHOWN = 5
_log = logging.getLogger(__name__)


def stand_ins(seed: int, epoch: int, index: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield (hash, index) of the samples to try instead of sample ``index`` of ``count``.

    A pure function: any rank, loader process or attempt tries the same samples in the same order. The hash
    seeds the generators that reading the sample may use.
    """
    for number in range(TRIES):
        word = hash_words(seed, epoch, index, number)
        if word % count != index:
            yield word, word % count


class BadSamples:
    """The bad samples that one rank of one attempt has seen; each is logged, written and counted once."""

    def __init__(self, paths: RunPaths, attempt: int, rank: int) -> None:
        self._attempt = paths.attempt(attempt)
        self._file = self._attempt.bad_samples(rank)
        earlier = [folder for folder in paths.attempt_folders() if folder.number < attempt]
        self._earlier: set[SampleKey] = set(of_attempts(paths, earlier))
        self._seen: set[SampleKey] = set()
        #: Number of samples that this rank was the first to report, in any attempt: counts of ranks add up.
        self.count = 0

    @property
    def earlier(self) -> int:
        """Number of samples that earlier attempts reported."""
        return len(self._earlier)

    def note(self, samples: Iterable[BadSample]) -> None:
        """Report the samples that were not reported before."""
        new = {s.key: s for s in samples if s.key not in self._seen and s.key not in self._earlier}
        if not new:
            return
        self._seen |= new.keys()
        # In a later epoch another rank meets the same sample, which has been reported by then.
        named = of_attempt(self._attempt)
        unreported = [sample for key, sample in new.items() if key not in named]
        self.count += len(unreported)
        for sample in unreported:
            _log.warning("data: skipped, since it can't be read: %s", printable(str(sample)))
        try:
            append(self._file, unreported)
        except (OSError, UnreadableFileError) as error:  # a full disk is reported by the checkpoints
            _log.warning("%s can't be written: %s", self._file, error)


def too_many(paths: RunPaths, at_most: int) -> BadFileError:
    """Return the error of a run with more bad samples than ``data.max_bad_samples`` allows."""
    bad_samples = list(all_known(paths).values())
    named = [printable(f"  {sample}") for sample in bad_samples[:_SHOWN]]
    if len(bad_samples) > _SHOWN:
        named.append(f"  … and {len(bad_samples) - _SHOWN} more, in attempts/*/rank-*.bad_samples.jsonl")
    headline = (
        f"data.max_bad_samples: more than {at_most} samples can't be read; fix or remove them, or write a "
        f"larger number than {max(at_most, len(bad_samples) - 1)}:"
    )
    return BadFileError([headline, *named])
