"""Kinds of broken files: each text, the exact place and key path of its problem, and a part of its remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.config.files import GOOD, problems_of


def changed(line: str, new: str) -> str:
    """Return the good file with one line replaced."""
    assert line in GOOD
    return GOOD.replace(line, new)


SGD = "  optimizer: {name: sgd, lr: 0.1}"
BROKEN = {
    "empty": ("", "1:1: the file is empty", "hpc-train schema"),
    "comment only": ("# nothing\n", "1:1: the file is empty", "hpc-train schema"),
    "list": ("- a\n", "1:1: the file holds a list", "key: value"),
    "scalar": ("abc\n", "1:1: the file holds the text 'abc'", "key: value"),
    "not UTF-8": (b"name: a\ntask: \xff\n", "2:7: byte 0xff is not UTF-8", "save it as UTF-8"),
    "control character": (b"name: a\x1b[2J\n", "1:8: character U+001B", "take it out"),
    "two documents": (GOOD + "---\nseed: 1\n", "12:1: a second document begins here", "one experiment"),
    "tab": ("model:\n\tname: x\n", "2:1: is not valid YAML", "not tabs"),
    "open list": ("a: [1, 2\nb: 3\n", "2:2: is not valid YAML", "close the list with ]"),
    "open quote": ("a: 'b\n", "2:1: is not valid YAML", "close the quote"),
    "colon in text": ("a: b: c\n", "1:5: is not valid YAML", "in quotes"),
    "indentation": ("a:\n    b: 1\n  c: 2\n", "3:3: is not valid YAML", "indent it like"),
    "bad escape": ('a: "\\UFFFFFFFF"\n', "1:7: is not valid YAML", "fix the escape"),
    "duplicate key": (GOOD + "task: x\n", "12:1: task: is given twice, on lines 2 and 12", "keep one"),
    "duplicate in flow": (
        changed(SGD, "  optimizer: {name: sgd, lr: 0.1, lr: 0.2}"),
        "11:35: optimization.optimizer.lr: is given twice, on lines 11 and 11",
        "keep one",
    ),
    "anchor": (changed("data:", "data: &d"), "5:7: data: has the anchor &d", "take the anchor out"),
    "alias": (GOOD + "evaluation: *e\n", "12:13: evaluation: is the alias *e", "write the value out"),
    "merge key": (GOOD + "evaluation:\n  <<: {a: 1}\n", "13:3: evaluation.<<: merge keys", "keys out"),
    "number as key": (GOOD + "1: 2\n", "12:1: the key is 1, not text", "in quotes"),
    "list as key": (GOOD + "? [a]\n: 2\n", "12:3: the key is a list, not text", "name"),
    "null as key": (GOOD + "null: 2\n", "12:1: the key is nothing, not text", "name"),
    "huge number": (
        GOOD + f"seed: {'9' * 5000}\n",
        "12:7: seed: is a number of more than 100 digits",
        "shorter",
    ),
    "half surrogate": (
        changed("name: digits-test", 'name: "\\uD800"'),
        "1:7: name: has a lone surrogate",
        "whole character",
    ),
    "unknown key": (GOOD + "sed: 3\n", "12:1: sed: unknown key", "did you mean seed?"),
    "unknown key inside": (
        changed(SGD, "  optimizer: {name: sgd, lr: 0.1, weigth_decay: 0}"),
        "11:35: optimization.optimizer.weigth_decay: unknown key",
        "did you mean weight_decay?",
    ),
    "key of another section": (
        GOOD + "epochs: 3\n",
        "12:1: epochs: unknown key",
        "mean optimization.epochs?",
    ),
    "misspelt required key": (
        changed("  global_batch_size: 64", "  global_batchsize: 64"),
        "9:3: optimization.global_batchsize: unknown key",
        "did you mean global_batch_size?",
    ),
    "no blank after the only colon": (
        changed("  name: digits\n", "  name:digits\n"),
        "6:3: data: needs a mapping with name, got the text 'name:digits'",
        "write name: digits, with a blank after the colon",
    ),
    "no blank in a section beside a short form": (
        GOOD + "compile:\n  mode:default\n",
        "13:3: compile: needs true or false or a mapping, got the text 'mode:default'",
        "write mode: default, with a blank after the colon",
    ),
    "no blank after the first colon": (
        changed("  epochs: 3\n", "  epochs:3\n"),
        "9:20: is not valid YAML",
        "write epochs: 3 on line 8, with a blank after the colon",
    ),
    "no blank after the last colon": (
        changed("  micro_batch_size: 16\n" + SGD, SGD + "\n  micro_batch_size:16"),
        "12:1: is not valid YAML",
        "write micro_batch_size: 16 on line 11, with a blank after the colon",
    ),
    "no blank after each colon": (
        GOOD + "slurm:\n  time_limit:24h\n  nodes:1\n",
        "13:3: slurm: needs a mapping, got the text 'time_limit:24h nodes:1'",
        "put a blank after the colon of time_limit:",
    ),
    "no blank in flow": (
        changed("lr: 0.1", "lr:0.1"),
        "11:26: optimization.optimizer.lr:0.1: unknown key",
        "write lr: 0.1, with a blank after the colon",
    ),
    "no blank before flow": (
        changed("data:\n  name: digits\n", "data:{name: digits}\n"),
        "5:1: data:{name: unknown key",
        "put a blank after the colon of data:",
    ),
    "no blank in arguments": (
        changed("  name: digits\n", "  name: digits\n  args: {width:8}\n"),
        "7:10: data.args.width:8: is not a valid argument name",
        "write width: 8, with a blank after the colon",
    ),
    "no blank in one argument": (
        changed("  name: digits\n", "  name: digits\n  args:\n    width:8\n"),
        "8:5: data.args: needs a mapping, got the text 'width:8'",
        "write width: 8, with a blank after the colon",
    ),
    "a colon of a URL": (
        GOOD + "environment:\n  https://x\n  b: 1\n",
        "14:4: is not valid YAML",
        "put the text in quotes",
    ),
    "missing key": (changed("name: digits-test\n", ""), "1:1: name: is missing", "write name:"),
    "missing inside": (
        changed("  global_batch_size: 64\n", ""),
        "7:1: optimization.global_batch_size: is missing",
        "write global_batch_size: a whole number of at least 1",
    ),
    "missing in flow": (
        changed(SGD, "  optimizer: {name: sgd}"),
        "11:3: optimization.optimizer.lr: is missing",
        "a number above 0",
    ),
    "missing mode of a score": (
        GOOD + "early_stopping: {metric: accuracy, patience: 3}\n",
        "12:1: early_stopping.mode: is missing",
        "write mode: max",
    ),
    "missing mode of a loss": (
        GOOD + "checkpoint:\n  best: {metric: ema_loss}\n",
        "13:3: checkpoint.best.mode: is missing",
        "write mode: min",
    ),
    "missing mode of an own metric": (
        GOOD + "early_stopping: {metric: height, patience: 3}\n",
        "12:1: early_stopping.mode: is missing",
        "write mode: one of min, max",
    ),
    "missing section": (
        changed("data:\n  name: digits\n", ""),
        "1:1: data: is missing",
        "write data: {name: digits}",
    ),
    "text for a number": (
        changed("global_batch_size: 64", "global_batch_size: '64'"),
        "9:22: optimization.global_batch_size: needs a whole number of at least 1, got the text '64'",
        "write 64 without quotes",
    ),
    "float for a whole number": (GOOD + "seed: 1.0\n", "12:7: seed: needs a whole number", "write 1"),
    "number for text": (
        changed("name: digits-test", "name: 12"),
        "1:7: name: needs 1 to 64 lower-case letters",
        "put it in quotes: '12'",
    ),
    "yes for true": (
        GOOD + "deterministic: yes\n",
        "12:16: deterministic: needs true or false, got the text 'yes'",
        "write true without quotes",
    ),
    "true for a number": (GOOD + "seed: true\n", "12:7: seed: needs a whole number", "write a number"),
    "nothing for a section": (
        changed("data:\n  name: digits\n", "data:\n"),
        "5:6: data: needs a mapping with name, got nothing",
        "write a value",
    ),
    "scalar for a section": (
        changed("data:\n  name: digits\n", "data: digits\n"),
        "5:7: data: needs a mapping with name, got the text 'digits'",
        "write {name: digits}",
    ),
    "scalar for a list": (
        GOOD + "environment: {modules: cuda}\n",
        "12:24: environment.modules: needs a list",
        "write a list: [cuda]",
    ),
    "pattern for a list": (
        changed("model:\n", 'model:\n  freeze: "*.bias"\n'),
        "4:11: model.freeze: needs a list, got the text '*.bias'",
        'write a list: ["*.bias"]',
    ),
    "flow character in a section": (
        changed("data:\n  name: digits\n", "data: 'a, b'\n"),
        "5:7: data: needs a mapping with name, got the text 'a, b'",
        'write {name: "a, b"}',
    ),
    "out of bounds": (
        changed("  name: digits\n", "  name: digits\n  augment: {hflip: 2}\n"),
        "7:20: data.augment.hflip: needs a number of 0 to 1, got 2",
        "write a number like 0",
    ),
    "infinite": (
        changed("lr: 0.1", "lr: .inf"),
        "11:30: optimization.optimizer.lr: needs a number above 0, got inf",
        "finite number",
    ),
    "not one of": (GOOD + "precision: bf61\n", "12:12: precision: needs one of fp32, tf32", "mean bf16?"),
    "bad pattern": (
        changed("name: digits-test", "name: My Run"),
        "1:7: name: needs 1 to 64 lower-case letters",
        "write text of this form",
    ),
    "pattern before a line break": (
        changed("name: digits-test", 'name: "ab\\n"'),
        "1:7: name: needs 1 to 64 lower-case letters",
        "write text of this form",
    ),
    "bare time": (
        GOOD + "slurm: {time_limit: 24}\n",
        "12:21: slurm.time_limit: a bare number has no unit",
        "write 24min or 24h",
    ),
    "bad time": (
        GOOD + "slurm: {time_limit: 5 weeks}\n",
        "12:21: slurm.time_limit: '5 weeks' is not a duration",
        "write 90min, 24h",
    ),
    "wrong member of a union": (
        changed("micro_batch_size: 16", "micro_batch_size: 0"),
        "10:21: optimization.micro_batch_size: needs a whole number of at least 1 or auto, got 0",
        "number like 1",
    ),
    "misspelt member of a union": (
        changed("micro_batch_size: 16", "micro_batch_size: Auto"),
        "10:21: optimization.micro_batch_size: needs a whole number of at least 1 or auto",
        "did you mean auto?",
    ),
    "mapping for a union": (
        changed("model:\n", "model:\n  pretrained: {str: 1}\n"),
        "4:15: model.pretrained: needs true or false or text, got a mapping",
        "write",
    ),
    "range of nodes": (
        GOOD + "slurm: {nodes: 2-}\n",
        "12:16: slurm.nodes: needs a whole number of at least 1 or a range like 2-8",
        "write",
    ),
    "lead out of range": (
        GOOD + "slurm: {signal_lead_s: 0}\n",
        "12:24: slurm.signal_lead_s: needs a whole number of 1 to 65535, got 0",
        "write a number like 1",
    ),
    "value like an option": (
        GOOD + "slurm: {partition: -x}\n",
        "12:20: slurm.partition: needs one word without blanks",
        "write text of this form",
    ),
    "path like an option": (
        GOOD + "environment: {container: --bind=/}\n",
        "12:26: environment.container: needs a path without blanks",
        "write text of this form",
    ),
    "two words for a GPU": (
        GOOD + "slurm: {gpu_type: 'a100:2,x'}\n",
        "12:19: slurm.gpu_type: needs one word like a100",
        "write text of this form",
    ),
    "value of an option": (
        GOOD + "slurm: {extra: {nice: 1.5}}\n",
        "12:23: slurm.extra.nice: needs text or a whole number or true or false, got 1.5",
        "write",
    ),
    "name of an option": (
        GOOD + "slurm: {extra: {No Name: 1}}\n",
        "12:17: slurm.extra.No Name: needs 1 to 64 lower-case letters",
        "fix the name",
    ),
    "bad short form": (
        changed("  epochs: 3\n", "  epochs: 3\n  loss: Cross Entropy\n"),
        "9:3: optimization.loss.name: needs 1 to 64 lower-case letters, digits, '_' or '-'",
        "write text of this form",
    ),
    "bad compile": (
        GOOD + "compile: 5\n",
        "12:10: compile: needs true or false or a mapping, got 5",
        "write",
    ),
    "inside compile": (
        GOOD + "compile: {mode: fast}\n",
        "12:17: compile.mode: needs one of default, reduce-overhead, max-autotune",
        "write one of them",
    ),
    "list too short": (
        changed("  name: digits\n", "  name: digits\n  augment:\n    random_resized_crop: {scale: [0.1]}\n"),
        "8:34: data.augment.random_resized_crop.scale: needs a list of 2, each a number above 0, got",
        "write a list of this form",
    ),
    "name of data": (
        changed("  name: digits\n", "  name: my data\n"),
        "6:9: data.name: needs a name like imagefolder or torchvision/CIFAR10, or package.module:factory",
        "write text of this form",
    ),
    "item of a list": (
        changed("  name: digits\n", "  name: digits\n  normalize: {mean: [0.5, x], std: [0.5, 0]}\n"),
        "7:27: data.normalize.mean[1]: needs a number, got the text 'x'",
        "write a number",
    ),
    "hostile key": (
        GOOD + '"\\e]0;x\\a\\n": 1\n',
        "12:1: \\x1b]0;x\\x07\\n: unknown key",
        "take it out",
    ),
    "long value": (GOOD + f"device: {'x' * 500}\n", "12:9: device: needs one of", "write one of them"),
}


@pytest.mark.fault(23, 24, 28)
@pytest.mark.parametrize(("text", "begins", "remedy"), BROKEN.values(), ids=BROKEN)
def test_a_problem_stands_at_its_place_with_its_remedy(
    tmp_path: Path, text: str | bytes, begins: str, remedy: str
) -> None:
    lines = problems_of(tmp_path, text)
    fitting = [line for line in lines if line.startswith(f"exp.yaml:{begins}")]
    assert fitting, lines
    assert remedy in fitting[0].rpartition("; ")[2] or remedy in fitting[0].partition("; ")[2], fitting


@pytest.mark.parametrize("text", [text for text, _, _ in BROKEN.values()], ids=list(BROKEN))
def test_problems_are_single_short_lines_in_plain_words(tmp_path: Path, text: str | bytes) -> None:
    for line in problems_of(tmp_path, text):
        assert re.fullmatch(r"exp\.yaml:\d+:\d+: [ -~…]+; [ -~…]+", line), line
        assert len(line) < 400
        assert not re.search(r"[Ii]nput should|valid (string|integer)|pydantic|dictionary|\\A", line)


def test_one_mistake_is_one_line(tmp_path: Path) -> None:
    several = {"alias", "tab", "mapping for a union", "item of a list"}
    for kind, (text, _, _) in BROKEN.items():
        if kind not in several:
            assert len(problems_of(tmp_path, text)) == 1, (kind, problems_of(tmp_path, text))


@pytest.mark.fault(23)
def test_all_problems_come_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = """\
name: Bad Name
task: clasification
model: {name: acme:f, args: {pretrained: true}}
data: {name: digits, normalize: {mean: [0.5], std: [0.5, 0.5]}}
optimization:
  epochs: 3
  steps: 5
  global_batch_size: 100
  micro_batch_size: 64
  optimizer: {name: sgd, lr: -1}
  schedule: {warmup_epochs: 3}
precision: int8
slurm: {nodes: 8-2, extra: {wrap: rm, Bad: 1}}
seed: &x 1
"""
    lines = problems_of(tmp_path, text)
    assert [line.split(": ")[1] for line in lines] == [
        "name",
        "task",
        "model.args.pretrained",
        "data.normalize.std",
        "optimization.steps",
        "optimization.global_batch_size",
        "optimization.optimizer.lr",
        "optimization.schedule.warmup_epochs",
        "precision",
        "slurm.nodes",
        "slurm.nodes",
        "slurm.extra.wrap",
        "slurm.extra.Bad",
        "seed",
    ]


def test_rules_do_not_judge_keys_that_failed(tmp_path: Path) -> None:
    text = GOOD.replace("global_batch_size: 64", "global_batch_size: many").replace("epochs: 3", "epochs: 0")
    assert len(problems_of(tmp_path, text)) == 2
