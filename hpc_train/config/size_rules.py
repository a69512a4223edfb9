"""Whether the model takes images of the file's size: a child process runs its forward on meta (``names``).

Asked of timm's and torchvision's models where the file says the size; of others the ranks find out.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpc_train.config import names
from hpc_train.config.problems import KeyPath, Problem, Rule, rule, shortened
from hpc_train.config.schema import Experiment
from hpc_train.registry import is_factory, split_name


@rule("model.name", "model.args", "data.name", "data.image_size", "data.args")
def images_fit_the_model(experiment: Experiment) -> Iterator[Problem]:
    model, said = experiment.model, _said_size(experiment)
    if said is None or not _is_listed(model.name):
        return
    path, size = said
    answer = names.facts(model.name, model.args, image_size=size)
    refusal, fitting = answer.get("size_refusal"), answer.get("fitting_size")
    if not isinstance(refusal, str) or not isinstance(fitting, int):
        return
    message = f"{shortened(model.name)} can't take images of {size}×{size} ({shortened(refusal).rstrip('.')})"
    own = f", or model.args: {{img_size: {size}}}" if answer.get("takes_img_size") is True else ""
    yield Problem(path, message, f"write {fitting}{own}")


def _said_size(experiment: Experiment) -> tuple[KeyPath, int] | None:
    """Return the key that says the side of the images, and the side in pixels."""
    data = experiment.data
    if data.image_size is not None:
        return ("data", "image_size"), data.image_size
    size = data.args.get("image_size")
    if data.name == "synthetic" and type(size) is int and 0 < size <= 8192:
        return ("data", "args", "image_size"), size
    return None


def _is_listed(name: str) -> bool:
    provider, rest = split_name(name)
    if is_factory(name) or provider not in {"timm", "torchvision"}:
        return False
    return rest.partition(".")[0] in (names.known_names(provider) or ())


#: It may start a child process.
MODEL_RULES: tuple[Rule, ...] = (images_fit_the_model,)
