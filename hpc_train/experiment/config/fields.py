"""The value types of the experiment file's keys, and the base class of its sections.

Among them durations as people write them for Slurm: ``90min``, ``24h``, ``2d``, ``24:00:00``,
``2-12:00:00``.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
)

from hpc_train.paths import NAME_PATTERN

#: Words for units of time, in seconds.
_WORDS_S = {
    1: "s sec secs second seconds",
    60: "m min mins minute minutes",
    3600: "h hr hrs hour hours",
    86400: "d day days",
}
_SECONDS = {word: seconds for seconds, words in _WORDS_S.items() for word in words.split()}
_MEASURE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([a-z]{1,7})", re.ASCII)
_UNITS_MIN = {"min": 1, "h": 60, "d": 24 * 60}
_WITH_UNIT = re.compile(r"(\d{1,6})\s*(min|h|d)", re.ASCII)
_CLOCK = re.compile(r"(?:(\d{1,3})-)?(\d{1,4}):(\d{2}):(\d{2})", re.ASCII)
#: Slurm's forms that are read as something else by many: ``48:00`` is 48 minutes, ``2-0`` is 2 days.
_SLURM_MIN_S = re.compile(r"(\d{1,4}):([0-5]\d)", re.ASCII)
_SLURM_DAYS = re.compile(r"(\d{1,3})-(\d{1,2})(?::(\d{2}))?", re.ASCII)
_UNLIMITED = {"unlimited", "infinite", "infinity", "inf", "none"}
#: Of keys in hours: keeps deadlines within what a ``timedelta`` holds.
MAX_HOURS = 1_000_000
FORMS = "24h, or a duration like 90min, 2d, 24:00:00 or 2-12:00:00"


def parse_duration_min(text: str) -> int:
    """Return whole minutes, seconds rounded up. Raises ValueError, which lists the valid forms."""
    if match := _WITH_UNIT.fullmatch(text.strip()):
        minutes = int(match[1]) * _UNITS_MIN[match[2]]
    elif match := _CLOCK.fullmatch(text.strip()):
        days, hours, mins, secs = (int(part or 0) for part in match.groups())
        if mins > 59 or secs > 59:
            raise ValueError(f"{text!r} has over 59 minutes or seconds; write {FORMS}")
        minutes = (days * 24 + hours) * 60 + mins + (secs > 0)
    else:
        raise ValueError(f"{text!r} is not a duration{_duration_remedy(text.strip())}")
    if minutes < 1:
        raise ValueError(f"{text!r} is zero; write at least 1min")
    return minutes


def format_duration(minutes: int) -> str:
    """Return minutes in the shortest form that ``parse_duration_min`` reads back."""
    return f"{minutes // 60}h" if minutes % 60 == 0 else f"{minutes}min"


def _duration_remedy(text: str) -> str:
    if seconds := seconds_in(text):
        return f"; write {format_duration(math.ceil(seconds / 60))}"
    if (match := _SLURM_MIN_S.fullmatch(text)) and int(match[1]):
        minutes = int(match[1]) + (match[2] != "00")
        return f" (Slurm reads minutes and seconds); write {minutes}min, or {match[1]}:{match[2]}:00"
    if (match := _SLURM_DAYS.fullmatch(text)) and text.strip("0-:"):
        days, hours, minutes = (int(part or 0) for part in match.groups())
        return f"; write {format_duration((days * 24 + hours) * 60 + minutes)}"
    if text.lower() in _UNLIMITED:
        return "; take it out: the limit is then the partition's"
    return f"; write {FORMS}"


def seconds_in(text: str) -> float | None:
    """Return the seconds that ``10 minutes``, ``1.5h``, ``1h30m`` or ``90s`` mean; None for anything else."""
    text = text.strip().lower()
    measures = [(amount, unit) for amount, unit in _MEASURE.findall(text) if unit in _SECONDS]
    if not measures or _MEASURE.sub("", text).strip() or len(measures) < len(_MEASURE.findall(text)):
        return None
    return sum(float(amount) * _SECONDS[unit] for amount, unit in measures)


#: ``package.module:factory``, or a class.
OWN_PART_PATTERN = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
#: ``provider/name``, a bare provider, or ``package.module:factory``.
PART_NAME_PATTERN = rf"[A-Za-z0-9_][A-Za-z0-9_./+-]*|{OWN_PART_PATTERN}"
# The values below appear in a batch script. None starts with a character that could make it an option.
#: A word that may stand in a ``#SBATCH`` line: no blank, quote, dollar, backquote, control character.
SLURM_WORD_PATTERN = r"[A-Za-z0-9_.,:@+*&|()\[\]=/~%^?][A-Za-z0-9_.,:@+*&|()\[\]=/~%^?-]{0,255}"
GPU_TYPE_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"
MAIL_PATTERN = r"[A-Za-z0-9._%+][A-Za-z0-9._%+-]{0,63}@[A-Za-z0-9.-]{1,190}"
MODULE_PATTERN = r"[A-Za-z0-9_.][A-Za-z0-9_.+/-]{0,127}"
SCRIPT_PATH_PATTERN = r"""[^-\s'"\\$`;&|<>\x00-\x1f\x7f][^\s'"\\$`;&|<>\x00-\x1f\x7f]{0,1023}"""


#: A time limit without a unit from this number on is probably in minutes.
_MANY_HOURS = 60


def pattern(regex: str, rule: str) -> Any:
    """Accept text that matches the pattern; ``rule`` describes it with an example, for editors and errors."""
    # Anchored at the very end: "$" would let a newline through.
    return Field(pattern=rf"\A(?:{regex})\z", json_schema_extra={"patternErrorMessage": rule})


def slurm_word(example: str) -> Any:
    """Accept one word of a ``#SBATCH`` line."""
    return pattern(SLURM_WORD_PATTERN, f"one word without blanks, quotes, '$' or ';', like {example}")


def _duration(value: object) -> object:
    if isinstance(value, str):
        return parse_duration_min(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise ValueError(f"{value} is not a duration; write {FORMS}")
        meant, other = ("min", "h") if value >= _MANY_HOURS else ("h", "min")
        raise ValueError(f"a bare number has no unit; write {value}{meant}, or {value}{other}")
    raise ValueError(f"needs a duration; write {FORMS}")


def _pair(value: object) -> object:
    # YAML has only lists, and strict validation accepts no list for a tuple.
    return tuple(value) if isinstance(value, list) else value


Name = Annotated[
    str,
    pattern(
        NAME_PATTERN,
        "1 to 64 lower-case letters, digits, '.', '_' or '-', starting with a letter or digit, like "
        "cifar10-resnet50",
    ),
]


def _of_provider(name: str, alias: str) -> AfterValidator:
    """Accept ``alias`` as the name of the provider ``name``."""
    return AfterValidator(lambda text: re.sub(rf"^{alias}(?=/|$)", name, text))


ModelName = Annotated[
    str,
    pattern(PART_NAME_PATTERN, "provider/name like timm/resnet50, or package.module:factory"),
    _of_provider("hf", alias="huggingface"),
]
DataName = Annotated[
    str,
    pattern(PART_NAME_PATTERN, "a name like imagefolder or torchvision/CIFAR10, or package.module:factory"),
    _of_provider("huggingface", alias="hf"),
]
FactoryName = Annotated[str, pattern(OWN_PART_PATTERN, "package.module:factory, like my_transforms:train")]
#: Slurm stores it in 16 bits.
SignalLead = Annotated[int, Field(ge=1, le=65535)]
DurationMin = Annotated[
    int,
    BeforeValidator(_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"type": "string", "examples": ["90min", "24h", "2-12:00:00"]}, mode="validation"),
]
Probability = Annotated[float, Field(ge=0, le=1)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
#: Keep deadlines within the longest time-out of threads and process groups.
MAX_MINUTES = 1_000_000
Minutes = Annotated[float, Field(gt=0, le=MAX_MINUTES)]
Hours = Annotated[float, Field(ge=0, le=MAX_HOURS)]
NotNegativeInt = Annotated[int, Field(ge=0)]
NotNegativeFloat = Annotated[float, Field(ge=0)]
Bounds = Annotated[tuple[PositiveFloat, PositiveFloat], BeforeValidator(_pair)]
FloatRange = Annotated[tuple[float, float], BeforeValidator(_pair)]
#: Whole numbers that a float represents exactly.
_ExactInt = Annotated[int, Field(ge=-(2**53), le=2**53)]
IntRange = Annotated[tuple[_ExactInt, _ExactInt], BeforeValidator(_pair)]
_PositiveExactInt = Annotated[int, Field(ge=1, le=2**53)]
PositiveIntRange = Annotated[tuple[_PositiveExactInt, _PositiveExactInt], BeforeValidator(_pair)]
_PLAIN_NAME_PATTERN = r"[a-z][a-z0-9_-]{0,63}"
_Side = Annotated[int, Field(ge=1, le=8192)]
#: The side of a square, or height and width, in pixels.
ImageSize = Annotated[_Side | tuple[_Side, _Side], BeforeValidator(_pair)]
PlainName = Annotated[
    str,
    pattern(
        _PLAIN_NAME_PATTERN,
        "1 to 64 lower-case letters, digits, '_' or '-', starting with a letter, like my_part",
    ),
]
TaskName = Annotated[
    str,
    pattern(
        rf"{_PLAIN_NAME_PATTERN}|{OWN_PART_PATTERN}",
        "a name in lower case like classification, or package.module:Class",
    ),
]
MethodName = Annotated[
    str,
    pattern(
        rf"{_PLAIN_NAME_PATTERN}|{OWN_PART_PATTERN}",
        "a name in lower case like tpe, or package.module:function",
    ),
]
#: Tasks may use names of classes in it.
MetricName = Annotated[
    str, pattern(r"[A-Za-z0-9_][A-Za-z0-9_.@+/ -]{0,127}", "the name of a metric, like accuracy or iou_car")
]
#: A metric of evaluations. ``sweep.search`` and ``compare`` call it ``val/loss``, which is ``loss`` here.
EvaluationMetric = Annotated[MetricName, AfterValidator(lambda name: name.removeprefix("val/") or name)]
OptimizerName = Annotated[
    str,
    pattern(
        r"[A-Za-z][A-Za-z0-9_/]{0,63}",
        "1 to 64 letters, digits, '_' or '/', starting with a letter, like adamw or timm/lamb",
    ),
]
ScheduleName = Annotated[str, pattern(r"[A-Za-z][A-Za-z0-9_/]{0,63}", "the name of a schedule, like cosine")]
ScriptPath = Annotated[
    str, pattern(SCRIPT_PATH_PATTERN, "a path without blanks, quotes, '$' or ';', like /opt/venv/bin/python")
]
NamePattern = Annotated[
    str,
    pattern(
        r"!?[A-Za-z0-9_.*?\[\]!-]{1,256}",
        "a pattern of names, like layer1.* or *.bias, without blanks; ! in front of it means: not these",
    ),
]
NodeRange = Annotated[str, pattern(r"[1-9][0-9]{0,5}-[1-9][0-9]{0,5}", "a range like 2-8")]
Arguments = dict[str, Any]


class Section(BaseModel):
    """A mapping of the file. Rejects unknown keys, conversions, inf and nan; immutable.

    ``config.keys`` reads the fields' docstrings from the source, once they are asked for;
    ``use_attribute_docstrings`` would at each import, a quarter of the time that it takes (measured).
    """

    # A section's validator is built as a part of the experiment's, or when it is used alone.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)


class StoredFields(BaseModel):
    """Fields of a file that hpc-train wrote and that may be damaged. Keys of a later version are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, defer_build=True)


#: A number of bytes, samples or tokens in such a file.
StoredCount = Annotated[int, Field(ge=0, lt=1 << 62)]
