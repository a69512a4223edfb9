"""Whether the model accepts images of the file's size: a child process runs its forward on the meta device
(``names``).

Checked for models of timm and torchvision where the file or the facts of the data set give the size; for
others ``prepare`` and the ranks find out.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpc_train.config.problems import KeyPath, Problem, Rule, rule, shortened
from hpc_train.config.schema import Experiment
from hpc_train.config.training_sections import DataConfig
from hpc_train.data_facts.facts import TASKS, data_facts
from hpc_train.registry import is_factory, split_name
from hpc_train.validate import model_facts

_IMAGE_SIZE: KeyPath = ("data", "image_size")
#: As that of ``data.image_size``.
_MAX_SIZE = 8192


@rule("model.name", "model.args", "data.name", "data.image_size", "data.args", "task")
def images_fit_the_model(experiment: Experiment) -> Iterator[Problem]:
    """The model must accept images of the size in the file, or of the data set's own."""
    model, key = experiment.model, _key_of_size(experiment)
    size = _own_size(experiment) if key is None else _written_size(experiment.data, key)
    if size is None or not _is_listed(model.name):
        return
    answer = model_facts.facts(model.name, model.args, image_size=size)
    refusal, fitting = answer.get("size_refusal"), answer.get("fitting_size")
    if not isinstance(refusal, str) or not isinstance(fitting, int):
        return
    name, why = shortened(model.name), shortened(refusal).rstrip(".")
    message = f"{name} can't take images of {size}×{size} ({why})"
    if key is None:
        data = shortened(experiment.data.name)
        message = f"is missing, and {name} can't take the {size}×{size} images of {data} ({why})"
    own = f", or model.args: {{img_size: {size}}}" if answer.get("takes_img_size") is True else ""
    yield Problem(key or _IMAGE_SIZE, message, f"write {fitting}{own}")


def _key_of_size(experiment: Experiment) -> KeyPath | None:
    """Return the key of the file that sets the image size; None where the data set's own size counts."""
    data = experiment.data
    if data.image_size is not None:
        return _IMAGE_SIZE
    argument = data_facts(data.name).image_size_argument
    return None if argument is None or argument not in data.args else ("data", "args", argument)


def _written_size(data: DataConfig, key: KeyPath) -> int | None:
    size = data.image_size if key == _IMAGE_SIZE else data.args[str(key[-1])]
    return size if type(size) is int and 0 < size <= _MAX_SIZE else None


def _own_size(experiment: Experiment) -> int | None:
    # A task of the user's may resize the images before the model takes them.
    return data_facts(experiment.data.name).image_size(experiment.data) if experiment.task in TASKS else None


def _is_listed(name: str) -> bool:
    provider, rest = split_name(name)
    if is_factory(name) or provider not in {"timm", "torchvision"}:
        return False
    return rest.partition(".")[0] in (model_facts.known_names(provider) or ())


#: May start a child process.
MODEL_RULES: tuple[Rule, ...] = (images_fit_the_model,)
