"""What login nodes, which import no torch, have to know of ``example/stripes``."""

from hpc_train.data_facts.facts import DataFacts

STRIPES = DataFacts("images", "class", num_samples=lambda data: data.args.get("num_samples", 100))
