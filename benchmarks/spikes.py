"""False alarms of ``optimization.on_spike`` on the recipes: steps that the rule flags in undisturbed runs.

    python -m benchmarks.spikes [--data data] [--only NAME …] [--runs FOLDER] [--quick]

Trains recipes of examples/ once by the real command, on two ranks with one thread each, and reads the loss
and the gradients' norm of every step from digests.bin. The rule is applied with several scores; the one that
training uses is ``hpc_train.run.spikes.SCORE``. No step of these runs was disturbed, so each flagged step is
a false alarm. Runs below ``--runs`` that are completed are not trained again. Writes
benchmarks/results/spikes.json.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.arms import environment, printed
from benchmarks.measuring import ROOT, conditions, parser, report, table
from hpc_train.run.digests import StepDigest, read_digests
from hpc_train.run.spikes import SCORE, WARM_UP, SpikeRule

SCORES = (3.5, SCORE, 7.0, 10.0)
#: Example → changes; DATA is the folder of ``--data``.
RECIPES = {
    "digits": ("optimization.epochs=100",),
    "shakespeare": ("data.root=DATA/tinyshakespeare.txt", "optimization.steps=300"),
    "cifar10-cpu": ("data.root=DATA/cifar10-images",),
    "camvid-lraspp": ("data.root=DATA/camvid", "data.image_size=[90, 120]"),
    "bccd-fcos": ("data.root=DATA/bccd", "optimization.steps=300"),
}
ALWAYS = ("device=cpu", "optimization.on_spike=report", "logging.every_steps=1000")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--data", type=Path, default=ROOT / "data")
    options.add_argument("--runs", type=Path, help="where runs are kept; default: a temporary folder")
    options.add_argument("--only", nargs="+", choices=[*RECIPES], default=[*RECIPES])
    arguments = options.parse_args()
    for name in arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            digests = _trained(
                name, arguments.data.absolute(), arguments.runs or Path(folder), quick=arguments.quick
            )
        row: dict[str, float | None] = {"judged steps": max(0, len(digests) - WARM_UP)}
        row |= {f"score {score:g}": _alarms(digests, score) for score in SCORES}
        measured = table(f"False alarms of on_spike, {name}", "flagged steps", {name: row})
        report("spikes", arguments, conditions(("timm", "torchvision")), tables=[measured])


def _alarms(digests: list[StepDigest], score: float) -> int:
    rule = SpikeRule(score)
    return sum(rule.judge(one.step, one.loss, one.grad_norm) is not None for one in digests)


def _trained(name: str, data: Path, runs: Path, *, quick: bool) -> list[StepDigest]:
    words = [word.replace("DATA", str(data)) for word in (*RECIPES[name], *ALWAYS)]
    if quick:
        words = [word for word in words if not word.startswith(("optimization.epochs", "optimization.steps"))]
        words += [
            "optimization.epochs=null",
            "optimization.steps=70",
            "optimization.schedule={name: constant}",
        ]
    submit = ["-m", "hpc_train", "submit", f"examples/{name}.yaml", *words, "--local", "--devices", "2"]
    printed([sys.executable, *submit], environment(None) | {"HPC_TRAIN_RUNS": str(runs)})
    (file,) = runs.glob(f"{name}/*/digests.bin")
    return list(read_digests(file))


if __name__ == "__main__":
    main()
