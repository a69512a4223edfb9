"""``hpc-train prepare``: fetches data and weights where there is network, for nodes that have none.

Runs in a process of its own, ``python -m hpc_train.engine.prepare FILE [KEY=VALUE…]``: commands import no
torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hpc_train.config.loading import load
from hpc_train.config.schema import Experiment
from hpc_train.datasets.building import build_source
from hpc_train.errors import ExitCode, UserError, printable
from hpc_train.models.building import build_model
from hpc_train.plan.sweep import expand
from hpc_train.runtime.data_info import DataInfo


def prepare(experiments: Sequence[Experiment]) -> None:
    """Build the data and the model of each experiment once, fetching what is missing."""
    infos: dict[str, DataInfo] = {}
    built: set[str] = set()
    for experiment in experiments:
        data = experiment.data.model_dump_json()
        if data not in infos:
            infos[data] = _fetch_data(experiment)
        model = experiment.model.model_dump_json()
        if data + model not in built:
            built.add(data + model)
            _fetch_model(experiment, infos[data])


def _fetch_data(experiment: Experiment) -> DataInfo:
    config = experiment.data
    source = build_source(config, download=True)
    where = f" in {config.root}" if config.root else ""
    num_val = 0 if source.val is None else len(source.val)
    _say(
        f"data {config.name}{where}: {len(source.train)} training and {num_val} validation samples, "
        f"{source.info.num_classes} classes"
    )
    return source.info


def _fetch_model(experiment: Experiment, info: DataInfo) -> None:
    config = experiment.model
    model = build_model(config, info, download=True)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    weights = "random weights" if config.pretrained is False else "pretrained weights at hand"
    _say(f"model {config.name}: {num_parameters} parameters, {weights}")


def _say(words: str) -> None:
    print(printable(words), file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    try:
        loaded = load(Path(arguments[0]), arguments[1:])
        prepare([variant.experiment for variant in expand(loaded)])
    except UserError as error:
        _say(str(error))
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except OSError as error:  # no network, no space
        _say(str(error))
        return int(ExitCode.IO)
    return int(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
