"""``hpc-train prepare``: fetches data and weights where there is network, and reads samples as training will.

Runs in a process of its own, ``python -m hpc_train.training.prepare FILE [KEY=VALUE…]``: commands import no
torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hpc_train.config.schema import Experiment
from hpc_train.datasets.base import DataSource
from hpc_train.datasets.batches import try_samples
from hpc_train.datasets.building import build_source
from hpc_train.datasets.normalize import Normalize
from hpc_train.datasets.types import DataInfo
from hpc_train.errors import ExitCode, UserError, printable
from hpc_train.models.building import build_model
from hpc_train.models.preprocessing import with_preprocessing
from hpc_train.models.weights import report_of
from hpc_train.plan.sweep import expand
from hpc_train.tasks.base import make_task, target_spec
from hpc_train.topology.batch_arithmetic import too_few_samples
from hpc_train.validate.loading import load as load_file


def prepare(experiments: Sequence[Experiment]) -> None:
    """Build the data and the model of each experiment once, fetching what is missing, and try the data."""
    sources: dict[str, DataSource] = {}
    tried: set[tuple[str, str, str]] = set()
    built: set[str] = set()
    for given in experiments:
        experiment = with_preprocessing(given)
        data, model = experiment.data.model_dump_json(), experiment.model.model_dump_json()
        if data not in sources:
            sources[data] = _fetch_data(experiment)
        if (data, model, experiment.task) not in tried:
            tried.add((data, model, experiment.task))
            _try_data(experiment, sources[data])
        _check_number_of_samples(experiment, sources[data])
        if data + model not in built:
            built.add(data + model)
            _fetch_model(experiment, sources[data].info)


def _fetch_data(experiment: Experiment) -> DataSource:
    config = experiment.data
    source = build_source(config, download=True)
    where = f" in {config.root}" if config.root else ""
    num_val = 0 if source.val is None else len(source.val)
    _say(
        f"data {config.name}{where}: {len(source.train)} training and {num_val} validation samples, "
        f"{source.info.num_classes} classes"
    )
    return source


def _try_data(experiment: Experiment, source: DataSource) -> None:
    """Read some samples as ranks do, for the task that the file names. Raises what training would raise."""
    task = make_task(experiment, source.info)
    batch, bad = try_samples(source, experiment, target_spec(task))
    Normalize(source.info, experiment.data)(batch.inputs)
    for sample in bad:
        _say(f"data: can't be used, another sample will replace it: {sample}")


def _check_number_of_samples(experiment: Experiment, source: DataSource) -> None:
    if problem := too_few_samples(experiment.optimization, len(source.train)):
        raise problem.as_error()


def _fetch_model(experiment: Experiment, info: DataInfo) -> None:
    config = experiment.model
    model = build_model(config, info, download=True)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    report = report_of(model)
    weights = "random weights" if config.pretrained is False else "pretrained weights at hand"
    weights = weights if report is None else report.line()
    _say(f"model {config.name}: {num_parameters} parameters, {weights}")


def _say(words: str) -> None:
    print(printable(words), file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    try:
        loaded = load_file(Path(arguments[0]), arguments[1:])
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
