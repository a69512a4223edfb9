"""Rules on the model: its arguments, and whether it takes images of their size and channels.

Sizes and channels are checked if the file or the facts of the data set give them; for others ``prepare`` and
the ranks find out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from hpc_train.errors import shortened
from hpc_train.experiment.config.explanations import args_problems
from hpc_train.experiment.config.fields import Arguments, PositiveInt, Section
from hpc_train.experiment.config.problems import KeyPath, Problem
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.data_facts import image_facts
from hpc_train.experiment.data_facts.built_in import TASKS
from hpc_train.experiment.data_facts.by_name import data_facts, provider_facts
from hpc_train.experiment.validate import model_facts
from hpc_train.experiment.validate.base import rule
from hpc_train.experiment.validate.part_rules import own_arguments
from hpc_train.registry import is_factory, split_name

_ARGS: KeyPath = ("model", "args")
_IMAGE_SIZE: KeyPath = ("data", "image_size")
#: As that of ``data.image_size``.
_MAX_SIZE = 8192


@rule(
    "model.image-size",
    "model.name model.args data.name data.image_size data.eval_size data.args task",
    looks_up_names=True,
)
def images_fit_the_model(experiment: Experiment) -> Iterator[Problem]:
    """The model must accept images of the size in the file, or of the data set's own.

    A child process runs the forward of a model of timm, torchvision or smp on the meta device.
    """
    if not model_facts.is_listed(experiment.model.name):
        return
    key = _key_of_size(experiment)
    # A task of the user's may resize the images before the model takes them.
    own = data_facts(experiment.data.name).image_size(experiment.data) if experiment.task in TASKS else None
    size = own if key is None else _written_size(experiment, key)
    if size is not None and (problem := _size_problem(experiment, key, size)):
        yield problem
    # Models of other providers for masks take any size.
    sides = experiment.data.eval_height_and_width if experiment.data.eval_size is not None else None
    if sides is None or provider_facts(experiment.model.name).stride == 1:
        return
    if problem := _size_problem(experiment, ("data", "eval_size"), _square_or_sides(sides)):
        yield problem


def _size_problem(experiment: Experiment, key: KeyPath | None, size: int | list[int]) -> Problem | None:
    """Return the problem with the size under ``key``; None as key: that of the data set."""
    model = experiment.model
    answer = model_facts.facts(model.name, model.args, image_size=size)
    refusal, fitting = answer.get("size_refusal"), answer.get("fitting_size")
    if not isinstance(refusal, str) or not isinstance(fitting, (int, list)):
        return None
    name, why = shortened(model.name), shortened(refusal).rstrip(".")
    sides = f"{size}×{size}" if isinstance(size, int) else "×".join(map(str, size))
    message = f"{name} can't take images of {sides} ({why})"
    if key is None:
        data = shortened(experiment.data.name)
        message = f"is missing, and {name} can't take the {sides} images of {data} ({why})"
    or_argument = f", or model.args: {{img_size: {size}}}" if answer.get("takes_img_size") is True else ""
    return Problem(key or _IMAGE_SIZE, message, f"write {shortened(str(fitting))}{or_argument}")


def _key_of_size(experiment: Experiment) -> KeyPath | None:
    """Return the key of the file that sets the image size; None if the data set's own size counts."""
    data = experiment.data
    if data.image_size is not None:
        return _IMAGE_SIZE
    argument = data_facts(data.name).image_size_argument
    return None if argument is None or argument not in data.args else ("data", "args", argument)


def _written_size(experiment: Experiment, key: KeyPath) -> int | list[int] | None:
    data = experiment.data
    if (
        key == _IMAGE_SIZE
        and provider_facts(experiment.model.name).stride > 1
        and data.height_and_width is not None
    ):
        return _square_or_sides(data.height_and_width)
    size = data.image_size if key == _IMAGE_SIZE else data.args[str(key[-1])]
    return size if type(size) is int and 0 < size <= _MAX_SIZE else None


def _square_or_sides(sides: tuple[int, int]) -> int | list[int]:
    height, width = sides
    return height if height == width else [height, width]


@rule("model.channels", "model.name", "data.name", "data.args")
def model_takes_the_channels(experiment: Experiment) -> Problem | None:
    """torchvision's models take gray and color images only."""
    number = _num_channels(experiment)
    return None if number is None else image_facts.model_problem(experiment.model.name, number)


@rule("model.in-chans", "model.name", "model.args", "data.name", "data.args", "task")
def in_chans_is_that_of_the_data(experiment: Experiment) -> Iterator[Problem]:
    """``in_chans`` of timm's models must be the number of channels of the data."""
    number, model = _num_channels(experiment), experiment.model
    # A task of the user's may give the model other channels.
    if number is None or split_name(model.name)[0] != "timm" or experiment.task not in TASKS:
        return
    if model.args.get("in_chans", number) != number:
        message = f"{model.args['in_chans']} channels, and the images of {experiment.data.name} have {number}"
        yield Problem(("model", "args", "in_chans"), message, "take it out; it follows from the data")


@rule("model.classes", "task", "model.name", "model.args", "data.name", "data.args")
def the_head_has_an_output_per_class(experiment: Experiment) -> Iterator[Problem]:
    """``model.args.num_classes`` must not be below the number of classes of the data."""
    model, data = experiment.model, experiment.data
    outputs, classes = model.args.get("num_classes"), data_facts(data.name).num_classes(data)
    is_built_in = experiment.task in TASKS and not is_factory(model.name)
    if is_built_in and type(outputs) is int and classes is not None and 0 <= outputs < classes:
        message = f"{outputs} outputs are too few for the {classes} classes of {shortened(data.name)}"
        yield Problem(("model", "args", "num_classes"), message, "take it out; it follows from the data")


@rule("normalize.channels", "data.name", "data.args", "data.normalize")
def normalization_has_a_value_per_channel(experiment: Experiment) -> Iterator[Problem]:
    """``data.normalize`` must have one value per channel of the images."""
    number, normalize = _num_channels(experiment), experiment.data.normalize
    if number is None or normalize is None or normalize.from_weights:
        return
    if len(normalize.mean) != len(normalize.std):
        return  # a rule of its own
    for key, values in (("mean", normalize.mean), ("std", normalize.std)):
        if values and (problem := image_facts.normalize_problem(key, values, number)):
            yield problem


def _num_channels(experiment: Experiment) -> int | None:
    return data_facts(experiment.data.name).channels(experiment.data)


@rule("model.gpt-arguments", "model.name", "model.args")
def gpt_takes_its_arguments(experiment: Experiment) -> Iterator[Problem]:
    """``model.args`` must be those of ``gpt``, and its heads must divide its width."""
    model = experiment.model
    if model.name == "gpt":
        yield from gpt_args_problems(own_arguments(_ARGS, model.args))


@rule("model.arguments", "model.name", "model.args", looks_up_names=True)
def the_model_takes_its_arguments(experiment: Experiment) -> Iterator[Problem]:
    """``model.args`` must be those of the model of timm, torchvision or smp; a child process builds it."""
    model = experiment.model
    args = own_arguments(_ARGS, model.args)
    if args and model_facts.is_listed(model.name):
        refusal = model_facts.args_refusal(model.name, args)
        if refusal is not None:
            message, _, remedy = refusal.removeprefix("model.args: ").rpartition("; ")
            yield Problem(_ARGS, message, remedy)


#: Keys that style gpt2 does not read.
_OF_LLAMA = ("num_kv_heads", "hidden_dim", "rope_theta", "norm_eps")
#: The default hidden width of llama's MLP is a multiple of it.
_HIDDEN_MULTIPLE = 64


class GPTArgs(Section):
    """``model.args`` of gpt."""

    style: Literal["gpt2", "llama"] = "gpt2"
    """Architecture of the blocks: ``gpt2``, or ``llama``: RoPE, RMSNorm, SwiGLU, no biases."""
    num_layers: PositiveInt = 4
    """Number of blocks."""
    num_heads: PositiveInt = 4
    """Number of attention heads per block; must divide ``dim``."""
    dim: PositiveInt = 128
    """Width of the residual stream."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of embeddings, of attention weights, and of the output of each residual branch."""
    tie_embeddings: bool = True
    """Whether the head shares the weight of the token embedding."""
    num_classes: PositiveInt | None = None
    """V. Default: the data set's."""
    num_kv_heads: PositiveInt | None = None
    """Style llama: heads of keys and values, each shared by ``num_heads / num_kv_heads`` heads of queries;
    must divide ``num_heads``. Default: ``num_heads``."""
    hidden_dim: PositiveInt | None = None
    """Style llama: hidden width of the MLP. Default: 8/3 of ``dim``, rounded up to a multiple of 64."""
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    """Style llama: base of the rotary frequencies."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Style llama: added to the mean square in RMSNorm."""


def default_hidden_dim(dim: int) -> int:
    """Return the default of ``hidden_dim``: 8/3 of the width, rounded up."""
    return -(-8 * dim // (3 * _HIDDEN_MULTIPLE)) * _HIDDEN_MULTIPLE


def gpt_args_problems(args: Arguments) -> list[Problem]:
    """Return the problem with the arguments."""
    if problems := args_problems(_ARGS, "gpt", GPTArgs, args):
        return problems
    checked = GPTArgs.model_validate(args)
    if checked.dim % checked.num_heads:
        fitting = checked.dim // checked.num_heads * checked.num_heads + checked.num_heads
        message = f"{checked.dim} is not a multiple of num_heads {checked.num_heads}"
        return [Problem((*_ARGS, "dim"), message, f"write {fitting}")]
    problem = _problem_of_gpt2(checked) if checked.style == "gpt2" else _problem_of_llama(checked)
    return [] if problem is None else [problem]


def _problem_of_gpt2(args: GPTArgs) -> Problem | None:
    llama_key = next((key for key in _OF_LLAMA if key in args.model_fields_set), None)
    if llama_key is None:
        return None
    return Problem((*_ARGS, llama_key), "is for style llama", "write style: llama too, or take it out")


def _problem_of_llama(args: GPTArgs) -> Problem | None:
    heads, width = args.num_heads, args.dim // args.num_heads
    groups = args.num_kv_heads or heads
    if heads % groups:
        fitting = next(number for number in range(groups, 0, -1) if heads % number == 0)
        message = f"{groups} does not divide num_heads {heads}"
        return Problem((*_ARGS, "num_kv_heads"), message, f"write {fitting}")
    if width % 2:
        message = f"{args.dim} gives each of {heads} heads {width} dimensions, and RoPE rotates pairs of them"
        return Problem((*_ARGS, "dim"), message, f"write {args.dim + heads}")
    return None
