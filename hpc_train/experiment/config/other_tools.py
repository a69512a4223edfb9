"""Commands and options of other tools, with their equivalents; ``corrections`` reads both tables."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from hpc_train.experiment.config.problems import KeyPath, dotted
from hpc_train.experiment.config.value_synonyms import value_for

#: Command line that is written here → its commands in other tools.
_VERBS = {
    "submit": (
        "train python python3 run fit launch start sbatch srun torchrun mpirun accelerate deepspeed execute "
        "exec begin enqueue "
        "queue-up pretrain finetune fine-tune learn main sub srun-train lightning do go up"
    ),
    "submit --new": "rerun re-run retrain",
    "submit --dry-run": "dry-run dryrun",
    "plan": "explain estimate preview price forecast",
    "validate": "check lint parse check-config validate-config",
    "doctor": "diagnose env environment healthcheck health collect-env check-env checkhealth info sysinfo",
    "init": "new create quickstart template generate scaffold setup make-config create-config examples",
    "prepare": "download fetch preprocess prefetch cache",
    "status": (
        "ls ps list show stat stats state st queue squeue jobs job runs sacct describe inspect get list-runs "
        "history experiments sinfo"
    ),
    "watch": "top htop monitor dashboard tui live ui gui viewer",
    "logs": "log tail head cat output stdout stderr attach follow journal less print-log sattach",
    "resume": "continue restart requeue retry recover unpause cont restore release",
    "cancel": "stop kill scancel abort terminate end interrupt pause halt down quit",
    "rm": "delete remove del destroy drop erase delete-run",
    "clean": "gc prune cleanup purge clear vacuum tidy",
    "evaluate": "eval test val score benchmark",
    "predict": "infer inference generate pred prediction classify forward",
    "export": "convert save onnx deploy package to-onnx dump publish",
    "verify": "fsck checksum hash verify-checkpoint",
    "compare": "best leaderboard results summary metrics table rank",
    "compare --diff": "diff",
    "report": "html plot plots visualize viz chart charts graph curves",
    "search": "sweep agent tune hpo optimize optuna hyperopt tuner bayes",
    "sync": "upload push",
    "sync --to wandb": "wandb",
    "sync --to mlflow": "mlflow",
    "sync --to tensorboard": "tensorboard tb",
    "notify": "test-webhook webhook ping",
    "schema": "json-schema jsonschema",
    "--version": "version",
}


class OptionRow(NamedTuple):
    """Options of other tools with one equivalent."""

    #: Space-separated commands it applies to; empty: all that have the equivalent.
    commands: str
    #: An option here, with ``{}`` for the value where it is written differently; ``FILE``, ``RUN`` or
    #: ``KEY=VALUE``: the value alone; ``key=value``: a key of the file; ``hpc-train NAME``: another command;
    #: empty: the option is omitted.
    written: str
    #: Names elsewhere: ``--name`` without a value, ``--name=`` with any, ``--name=value`` with this one.
    names: str
    #: Added to the answer.
    note: str = ""


_STARTS = "submit plan search doctor resume"

#: The first row that applies counts. Names of keys of the file are in ``config.synonyms``.
OPTION_ROWS = (
    OptionRow("status", "hpc-train watch", "--watch -w --follow -f --live --refresh --interactive"),
    OptionRow("status", "", "--all -a -A", "without RUN it shows all runs"),
    OptionRow("status", "hpc-train compare latest --csv", "--csv --format=csv"),
    OptionRow("status", "--failed", "--errors --state=failed --state=FAILED --only-failed --status=failed"),
    OptionRow(
        "status",
        "",
        "--limit= -n= --state= --filter= --user= -u= --me --columns= --fields= --running --long -l --last=",
        "the table has all runs; --sort KEY orders it, --json prints all fields",
    ),
    OptionRow(
        "watch", "", "--follow -f --live --refresh --watch -w", "watch follows runs until q is pressed"
    ),
    OptionRow("cancel", "", "--force -f --yes -y", "cancel asks nothing"),
    OptionRow(
        "resume",
        "",
        "--checkpoint= --ckpt= --ckpt-path= --from-step= --step= --from= --resume-from-checkpoint=",
        "a run continues from its newest intact checkpoint",
    ),
    OptionRow(
        "evaluate predict",
        "",
        "--split= --subset= --dataset= --batch-size= --bs=",
        "the validation data are read; data.root=PATH names others",
    ),
    OptionRow("export", "", "--opset= --opset-version= --fp16 --half --simplify --dynamic --dynamic-axes"),
    OptionRow("compare", "", "--best", "the best run comes first"),
    OptionRow("logs", "--follow", "-F --watch --live --stream --tail-follow --wait"),
    OptionRow("logs", "--lines {}", "--tail= --num-lines= --head= --last-lines= --n= --num="),
    OptionRow("logs", "--follow", "--tail -t"),
    OptionRow("logs", "--last", "--latest --newest"),
    OptionRow("logs", "--rank {}", "--worker= --process= --task= --local-rank= -r="),
    OptionRow(
        "logs", "", "--stderr --stdout --err --out --timestamps --no-pager", "a log has all output of a rank"
    ),
    OptionRow(
        "export",
        "-o {}.onnx",
        "--onnx --format=onnx --to=onnx --type=onnx -f=onnx "
        "--target=onnx --output-format=onnx --export-format=onnx",
    ),
    OptionRow("export", "-o {}.pt2", "--format=pt2 --pt2 --format=torch_export --torch-export"),
    OptionRow(
        "export",
        "-o {}.safetensors",
        "--safetensors --format=safetensors --format=pt --format=pth --format=pytorch --format=bin "
        "--format=torchscript --torchscript --weights-only --state-dict --format= --to= --type= -f=",
        "the suffix of -o selects the format",
    ),
    OptionRow("predict", "-o {}.csv", "--csv --format=csv"),
    OptionRow("predict", "-o {}.jsonl", "--jsonl --format=jsonl --format=json"),
    OptionRow("predict", "--data {}", "--input= --inputs= --image= --images= --source= -i= --folder= --dir="),
    OptionRow("predict", "--force", "--overwrite -f"),
    OptionRow("compare", "--csv", "--format=csv --output=csv"),
    OptionRow("compare", "--metric {}", "--sort= --sort-by= --by= --metrics= --order-by= -m="),
    OptionRow("sync", "--to {}", "--target= --backend= --logger="),
    OptionRow("sync", "--to wandb", "--wandb"),
    OptionRow("sync", "--to mlflow", "--mlflow"),
    OptionRow("sync", "--to tensorboard", "--tensorboard --tb"),
    OptionRow("init", "--data {}", "--dataset= -d="),
    OptionRow("init", "--root {}", "--data-dir= --path= --data-root= --folder= --dataset-path= --data-path="),
    OptionRow("init", "--model {}", "--arch= --net= --network= -m= --backbone= --architecture="),
    OptionRow("init", "--from {}", "--template= --recipe= --example= --preset= -t="),
    OptionRow("init", "--queue {}", "--partition= -p= -q="),
    OptionRow("init", "--gpus {}", "--num-gpus= --ngpus= --gpus-per-node= -g= --n-gpus="),
    OptionRow(
        "init", "", "--force -f --overwrite", "an existing file is never overwritten; -o names another"
    ),
    OptionRow(
        "cancel rm clean",
        "",
        "--all -a --user= -u= --me",
        "name an experiment instead of RUN for all of its runs",
    ),
    OptionRow("resume", "--code new", "--new-code --update-code --current-code --latest-code"),
    OptionRow("resume", "--take-over", "--force -f --steal"),
    OptionRow("resume", "", "--dry-run -n --resume --continue --auto --all -a"),
    OptionRow(
        "plan", "", "--dry-run -n --dryrun --verbose --cost --time", "plan starts nothing and shows all"
    ),
    OptionRow("validate", "", "--dry-run -n --strict --check --all", "validate starts nothing"),
    OptionRow("rm clean", "", "--dry-run -n --dryrun", "it lists what it would remove and asks"),
    OptionRow("prepare", "--no-forward", "--download-only --no-check --no-test --skip-forward"),
    OptionRow("doctor", "--submit", "--full --run --job --deep"),
    OptionRow(_STARTS, "slurm.ranks_per_node={}", "-n= --np= -np= --nproc="),
    OptionRow(_STARTS, "slurm.nodes={}", "-N= --num-machines="),
    OptionRow(_STARTS, "slurm.partition={}", "-p= -q="),
    OptionRow(_STARTS, "slurm.account={}", "-A="),
    OptionRow(_STARTS, "slurm.time_limit={}", "-t="),
    OptionRow(_STARTS, "slurm.constraint={}", "-C="),
    OptionRow(_STARTS, "slurm.exclude={}", "-x="),
    OptionRow(_STARTS, "slurm.gpus_per_node={}", "-G= -g= --gpu="),
    OptionRow(_STARTS, "slurm.extra.nodelist={}", "--nodelist= -w="),
    OptionRow(_STARTS, "slurm.extra.exclusive=true", "--exclusive"),
    OptionRow(_STARTS, "slurm.extra.licenses={}", "--licenses= -L="),
    OptionRow(_STARTS, "", "--array= -a=", "the runs of the file's `sweep` are one array job"),
    OptionRow(
        "",
        "",
        "--gpu-ids= --gpu-id= --device-ids= --cuda-devices= --visible-devices=",
        "the variable CUDA_VISIBLE_DEVICES selects this machine's GPUs",
    ),
    OptionRow("", "precision={}", "--mixed-precision= --amp-dtype= --dtype= --torch-dtype="),
    OptionRow(_STARTS, "name={}", "-J="),
    OptionRow(
        "submit",
        "",
        "--resume --continue --auto-resume --resume= -r --wait -W --follow --detach --background -d --attach",
        "the same file again is the same run: `hpc-train status` shows it, `hpc-train logs -f "
        "latest` follows it",
    ),
    OptionRow(
        "submit",
        "",
        "-m --multirun --sweep",
        "the file's `sweep: {grid: {KEY: [VALUE, …]}}` makes it several runs",
    ),
    OptionRow(
        "", "FILE", "--config= -c= --config-file= --config-path= --cfg= --file= -f= --yaml= --conf= --exp="
    ),
    OptionRow(_STARTS, "slurm.cpus_per_gpu={}", "-c="),
    OptionRow(
        "", "--dry-run", "-n --dryrun --dry --test --test-only --check --simulate --print --show --plan"
    ),
    OptionRow(
        "", "--local", "--here --interactive --foreground --no-slurm --standalone --no-queue --cpu-only"
    ),
    OptionRow(
        "", "--new", "--overwrite --force -f --fresh --from-scratch --no-resume --restart --rerun --again"
    ),
    OptionRow("", "--jobs {}", "-j= --n-jobs= --num-jobs= --parallel-runs= --concurrency="),
    OptionRow("", "--profile", "--profiler --trace --with-profiler"),
    OptionRow("", "--rounds {}", "--n-trials= --count= --max-trials= --num-trials="),
    OptionRow("", "--yes", "--force -f -r -rf -fr --no-confirm --assume-yes --confirm --no-prompt --ok"),
    OptionRow(
        "", "--best", "--checkpoint=best --ckpt=best --ckpt-path=best --weights=best --which=best --use-best"
    ),
    OptionRow(
        "",
        "",
        "--checkpoint=last --ckpt=last --ckpt-path=last --weights=last --checkpoint=latest --last --latest",
        "the newest checkpoint is the default",
    ),
    OptionRow("", "--step {}", "--checkpoint= --ckpt= --ckpt-path= --ckpt-step= --global-step= --iteration="),
    OptionRow(
        "", "-o {}", "--out= --outfile= --output-file= --file= --save= --dest= --save-to= --html= --to="
    ),
    OptionRow("", "--csv", "--as-csv"),
    OptionRow("", "--sort {}", "--sort-by= --order-by= -s= --order="),
    OptionRow("", "--json", "--format=json -o=json --output=json --output-format=json --as-json -j"),
    OptionRow("", "--ema", "--use-ema --ema-weights"),
    OptionRow(
        "evaluate predict",
        "--devices {}",
        "--gpus= --nproc= --np= -n= --num-gpus= --nproc-per-node= --num-processes= --ngpus=",
    ),
    OptionRow("", "FILE.yaml", "--config-name= -cn="),
    OptionRow(
        "",
        "KEY=VALUE",
        "--set= --override= -o= --opts= --overrides= --cfg-options= --param= -P= --options= -D=",
    ),
    OptionRow("", "RUN", "--run= --run-id= --id= --name= --job= --job-id= -j= --experiment= -r= --jobid="),
    OptionRow(
        "",
        "logging.wandb.project=my-project",
        "--wandb --use-wandb --report-to=wandb --logger=wandb --log-with=wandb",
    ),
    OptionRow(
        "", "logging.tensorboard=true", "--tensorboard --report-to=tensorboard --logger=tensorboard --tb"
    ),
    OptionRow("", "precision=fp16", "--fp16 --half"),
    OptionRow("", "precision=bf16", "--bf16 --amp --mixed-precision --use-amp --autocast"),
    OptionRow("", "precision=tf32", "--tf32"),
    OptionRow("", "device=cpu", "--cpu --no-cuda --use-cpu --no-gpu"),
    OptionRow("", "device=cuda", "--cuda --use-cuda --gpu --use-gpu"),
    OptionRow("", "parallel.strategy=ddp", "--ddp"),
    OptionRow("", "parallel.strategy=fsdp", "--fsdp --deepspeed --use-fsdp --zero3"),
    OptionRow(
        "",
        "",
        "--verbose -v -vv --quiet -q --debug --silent --no-color --color= --progress --no-progress "
        "--log-level=",
    ),
)

VERBS = {verb: written for written, verbs in _VERBS.items() for verb in verbs.split()}


#: sbatch's forms of a time in minutes: ``90``, ``90:00``.
_MINUTES = re.compile(r"\d+:\d\d")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", re.IGNORECASE)
#: sbatch's units of memory, in GB.
_GB = {"K": 2**-20, "M": 2**-10, "": 2**-10, "G": 1, "T": 2**10}


def overrides_of(path: KeyPath, value: str) -> Iterator[str]:
    """Yield ``KEY=VALUE`` with the value as it is written here; Slurm's GPUs may be of a type."""
    key = dotted(path)
    if key == "slurm.gpus_per_node":
        *kind, number = value.removeprefix("gpu:").split(":")
        yield f"{key}={number if number.isdigit() or not value.startswith('gpu') else 1}"
        yield from (f"slurm.gpu_type={word}" for word in kind if word != "gpu")
    elif key == "slurm.mem_gb" and (match := _MEMORY.fullmatch(value)):
        yield f"{key}={math.ceil(float(match[1]) * _GB[match[2].upper()])}"
    elif key == "slurm.time_limit" and (value.isdigit() or _MINUTES.fullmatch(value)):
        yield f"{key}={int(value.partition(':')[0])}min"
    else:
        yield f"{key}={value_for(path, value) or value}"
