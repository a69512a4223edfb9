"""Amount of /dev/shm that the loader processes of a node fill. Called by the node check and ``doctor``."""

from __future__ import annotations

import math

from hpc_train.config.schema import Experiment
from hpc_train.data_facts.by_name import data_facts

#: Batches that each loader process reads ahead.
PREFETCHED_BATCHES = 2


def prefetched_bytes(experiment: Experiment, ranks: int = 1) -> int | None:
    """Return the bytes of the images that the training loaders of ``ranks`` ranks read ahead.

    None if the file does not determine it: a key is ``auto``, or the images' size is unknown or varies.
    """
    data, facts = experiment.data, data_facts(experiment.data.name)
    side = data.args.get(facts.image_size_argument or "", facts.image_size(data))
    height, width = data.height_and_width or (side, side)
    batch, channels = experiment.optimization.micro_batch_size, facts.channels(data)
    numbers = [height, width, channels, batch, data.workers]
    if facts.modality != "images" or not all(type(number) is int for number in numbers):
        return None
    return math.prod(int(number or 0) for number in numbers) * ranks * PREFETCHED_BATCHES
