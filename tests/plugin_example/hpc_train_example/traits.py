"""What login nodes, which import no torch, have to know of ``by_parameter``."""

from hpc_train.plugins import StrategyTraits

BY_PARAMETER = StrategyTraits(degrees=("replicate",), arguments=("average_in_double",), runs_one_by_one=True)
