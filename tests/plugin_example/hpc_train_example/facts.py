"""What commands on login nodes, which import no torch, need to know of ``example/stripes`` and ``margin``."""

from hpc_train.plugins import DataFacts, TaskFacts

STRIPES = DataFacts("images", "class", num_samples=lambda data: data.args.get("num_samples", 100))
MARGIN = TaskFacts(modalities=("images",), targets=("class",))
