"""Experiment files and overrides that somebody made to break the reader: hypothesis's strategies."""

from __future__ import annotations

import json
import re

import yaml
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from hpc_train.experiment.config.keys import all_keys

#: Says something of every section. ``canary`` is a module that must not be imported.
FULL: dict[str, object] = yaml.safe_load("""
name: digits-test
seed: 3
device: cpu
deterministic: true
task: classification
model: {name: "canary:build", pretrained: false, args: {width: 8}}
data:
  name: canary:data
  root: data/x
  args: {num_samples: 100}
  image_size: 8
  transform: {name: "canary:transform", args: {width: 8}}
  augment: {hflip: 0.5, random_resized_crop: {scale: [0.1, 1.0]}, randaugment: {num_ops: 2}}
  normalize: {mean: [0.5], std: [0.5]}
  workers: 2
optimization:
  epochs: 3
  global_batch_size: 64
  micro_batch_size: 16
  optimizer: {name: sgd, lr: 0.1, momentum: 0.9, args: {nesterov: true}}
  schedule: {name: cosine, warmup_epochs: 1}
  clip_grad_norm: 1.0
parallel: {strategy: ddp}
precision: bf16
compile: {mode: default}
evaluation: {every_epochs: 1}
checkpoint: {every_min: 5, keep: 2}
recovery: {max_crashes: 1}
slurm: {partition: gpu, nodes: 2-4, time_limit: 24h, extra: {nice: 5}}
environment: {python: /opt/python, modules: [cuda/12.8]}
sweep: {grid: {seed: [1, 2], optimization.optimizer.lr: [0.1, 0.2]}}
logging: {wandb: {project: x, tags: [a]}}
""")

KEYS = [".".join(map(str, path)) for path in all_keys()]
#: Values as they stand in a file, each of which can be read.
FRAGMENTS = (
    "9" * 99, "9" * 5000, "-1", "0", "1", "1e400", "-1e-400", "1e99", ".inf", "-.inf", ".nan",
    "0x" + "f" * 90, "0o7", "9223372036854775808", "1.0", "true", "on", "~", "", "''", "2026-01-01",
    "2001-12-14t21:59:43.10-05:00", "24:00:00", "auto", "0-0", "8-2", "999999-999999", "1.5h", "0min",
    "99999999999999999999h", '"\\0"', '"\\x1b]0;x\\x07"', '"\\uD800"', '"\\U0010FFFF"', '"\\u202e"',
    '"a\\nb"', "'\u200b'", '"\\N\\L\\P"', "$(touch ran)", "; touch ran", "../../etc/passwd", "-x",
    "--wrap=x", "canary:build", "canary.sub:build.more", "os:system", "x" * 5000, "\U0001f600",
    "timm/resnet50", "torchvision/CIFAR10", "[0.1, 0.2]", "[1, 1.0, true]", "{}", "[]", "[[]]",
    "{a: {b: {c: 1}}}", "{name: x}", "[" * 60 + "]" * 60,
)  # fmt: skip
#: Values that no file may hold.
REFUSED = (
    "!!python/object/apply:os.system ['touch ran']", "!!python/name:os.system x", "!!binary aGk=",
    "!!set {a, b}", "!!python/object/new:subprocess.Popen [[touch, ran]]", "! x", "!<tag> x", "&a [1]",
    "*a", "&a &b x", "{<<: *a}", "{<<: {seed: 1}}", "[a, [b, *a]]", "{a: 1, a: 2}", "{1: 2}", "{? [a]: b}",
    "{null: 1}", "[", "]", "{", "}", "'", '"', "|", ">", "|2\n  x", "%", "@", "`touch ran`", "a: b", "# x",
    "- x", "---", "...", "\t", "\0", "\x85", "\u2028", "\ufeff", "\ud800", "\x1b[2J", '"\\UFFFFFFFF"',
    "[" * 70 + "]" * 70, "{a: " * 70 + "}" * 70, "[" * 500, "- " * 100,
)  # fmt: skip


#: What a file may hold as an escape only.
_UNSEEN = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


class Raw(str):
    """Text that stands in the file as it is."""


def rendered(value: object) -> str:
    """Return a value in flow style; pairs of a tuple are a mapping, whose keys may stand twice."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, tuple):
        return "{" + ", ".join(f"{rendered(key)}: {rendered(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(rendered, value)) + "]"
    return _UNSEEN.sub(lambda found: f"\\U{ord(found[0]):08x}", json.dumps(value, ensure_ascii=False))


def file_text(pairs: object) -> str:
    """Return a file with one line a key."""
    assert isinstance(pairs, tuple)
    return "".join(f"{rendered(key)}: {rendered(value)}\n" for key, value in pairs)


_MIB = 2**20


def huge() -> dict[str, bytes]:
    """Return files of up to 1 MiB, the largest that is read, each long in another way."""
    rest = {key: value for key, value in FULL.items() if key != "sweep"}
    lines = file_text(tuple(rest.items()))
    keys = ", ".join(f"k{number}: 1" for number in range(19_000))
    args = lines.replace('"num_samples": 100', keys)
    values = ", ".join(map(str, range(1, 9000)))
    texts = {
        "values": "a: [" + "1," * (_MIB // 2 - 5) + "]",
        "aliases": "a: [" + "*a," * (_MIB // 3 - 5) + "]",
        "unknown keys": "".join(f"k{number}: 1\n" for number in range(40_000)),
        "directives": "%a\n" * (_MIB // 3),
        "digits": "seed: " + "9" * (_MIB - 10),
        "nesting": "[" * _MIB,
        "wrong options": lines.replace('"nice": 5', keys.replace("k", "K")),
        "swept keys": lines
        + "sweep: {grid: {"
        + ", ".join(f"k{n}: [1, 2, 3]" for n in range(9_500))
        + "}}\n",
        "swept arguments": lines
        + "sweep: {grid: {"
        + ", ".join(f"model.args.k{number}: [1, 2, 3]" for number in range(9_500))
        + "}}\n",
        "swept values": args + f"sweep: {{grid: {{optimization.optimizer.lr: [{values}]}}}}\n",
    }
    return {name: text[:_MIB].encode() for name, text in texts.items()}


_fragments = st.sampled_from(FRAGMENTS).map(Raw)
_refused = st.sampled_from(REFUSED).map(Raw)
_words = st.text(max_size=12) | st.text("abc.:-_/ $`'\"\\\n\t\0", max_size=12)
_numbers = (
    st.integers(-(2**70), 2**70) | st.integers(-2, 9) | st.floats(allow_nan=False, allow_infinity=False)
)
_plain = _fragments | _fragments | _words | _numbers | st.none() | st.booleans()
_leaves = st.integers(0, 14).flatmap(lambda number: _plain if number else _refused)
_names = st.sampled_from(sorted({key.rpartition(".")[2] for key in KEYS})) | _words.filter(bool)
_structures: SearchStrategy[object] = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=4) | st.lists(st.tuples(_names, inner), max_size=4).map(tuple),
    max_leaves=12,
)
_top = st.lists(st.tuples(st.sampled_from(list(FULL)) | _names, _structures), max_size=6).map(tuple)

#: Anything at all.
noise = st.binary(max_size=300) | (
    st.text(max_size=200) | st.text("ab01:-?[]{},&*!|>'\"%@`#\n \\ux.~<=e", max_size=120)
).map(lambda text: text.encode("utf-8", "surrogatepass"))
#: YAML of any shape, or nearly.
structures = _top.map(lambda pairs: file_text(pairs).encode("utf-8", "surrogatepass"))


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """A valid file with some keys dropped, given another value, doubled or renamed."""
    tree: object = tuple(FULL.items())
    for _ in range(draw(st.integers(0, 4))):
        path = draw(st.sampled_from(KEYS)).split(".")
        tree = _mutated(draw, tree, path)
    return file_text(tree).encode("utf-8", "surrogatepass")


def _mutated(draw: st.DrawFn, tree: object, path: list[str]) -> object:
    """Change the key at ``path``, or where the file has no such key, put it there."""
    pairs = list(tree.items() if isinstance(tree, dict) else tree if isinstance(tree, tuple) else ())
    place = next((i for i, (key, _) in enumerate(pairs) if key == path[0]), len(pairs))
    old = pairs[place][1] if place < len(pairs) else {}
    if len(path) > 1 and draw(st.integers(0, 9)):
        new = [(path[0], _mutated(draw, old, path[1:]))]
    else:
        new = draw(
            st.sampled_from(
                [
                    [],
                    [(path[0], draw(_structures))],
                    [(path[0], old), (path[0], draw(_leaves))],
                    [(draw(_names), old)],
                    [(path[0][:-1] + draw(st.sampled_from("sx_ ")), old)],
                ]
            )
        )
    pairs[place : place + 1] = new
    return tuple(pairs)


_override_keys = st.sampled_from(KEYS) | st.sampled_from(
    [
        "model.args.a.b", "sweep.grid.seed", "sweep.grid.model.args.x", "compile.mode", "a." * 70 + "b", ".",
        "seed.x",
    ]
)  # fmt: skip
_pairs = st.builds("{}={}".format, _override_keys, _structures.map(rendered) | _leaves.map(rendered))
#: ``KEY=VALUE``, and words that are none.
overrides = st.lists(
    st.integers(0, 7).flatmap(lambda number: _pairs if number else _words), min_size=1, max_size=3
)
