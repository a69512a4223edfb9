"""Whether the model accepts images of the file's size: a child process runs its forward on the meta device
(``names``).

Checked for models of timm and torchvision where the file gives the size; for others the ranks find out.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpc_train.config.problems import KeyPath, Problem, Rule, rule, shortened
from hpc_train.config.schema import Experiment
from hpc_train.data_facts.facts import data_facts
from hpc_train.registry import is_factory, split_name
from hpc_train.validate import model_facts


@rule("model.name", "model.args", "data.name", "data.image_size", "data.args")
def images_fit_the_model(experiment: Experiment) -> Iterator[Problem]:
    """The model must accept images of the given size."""
    model, said = experiment.model, _said_size(experiment)
    if said is None or not _is_listed(model.name):
        return
    path, size = said
    answer = model_facts.facts(model.name, model.args, image_size=size)
    refusal, fitting = answer.get("size_refusal"), answer.get("fitting_size")
    if not isinstance(refusal, str) or not isinstance(fitting, int):
        return
    message = f"{shortened(model.name)} can't take images of {size}×{size} ({shortened(refusal).rstrip('.')})"
    own = f", or model.args: {{img_size: {size}}}" if answer.get("takes_img_size") is True else ""
    yield Problem(path, message, f"write {fitting}{own}")


def _said_size(experiment: Experiment) -> tuple[KeyPath, int] | None:
    """Return the key that sets the image size, and the size in pixels."""
    data = experiment.data
    if data.image_size is not None:
        return ("data", "image_size"), data.image_size
    argument = data_facts(data.name).image_size_argument
    size = None if argument is None else data.args.get(argument)
    if argument is not None and type(size) is int and 0 < size <= 8192:
        return ("data", "args", argument), size
    return None


def _is_listed(name: str) -> bool:
    provider, rest = split_name(name)
    if is_factory(name) or provider not in {"timm", "torchvision"}:
        return False
    return rest.partition(".")[0] in (model_facts.known_names(provider) or ())


#: May start a child process.
MODEL_RULES: tuple[Rule, ...] = (images_fit_the_model,)
