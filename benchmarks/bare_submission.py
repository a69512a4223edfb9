"""What ``submit`` and ``status`` can't do without, as a bare script: files, fsyncs, one sbatch or squeue.

    python benchmarks/bare_submission.py submit RUN FOLDER NUMBER
    python benchmarks/bare_submission.py status FOLDER

``submit`` writes NUMBER copies of RUN, a run that hpc-train has submitted, into FOLDER: the same files, with
the same fsyncs one after the other, and a held job of NUMBER tasks. Started by benchmarks/submission.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_SYNCED = ("resolved.json", "experiment.yaml", "run.json")


def submit(run: str, folder: str, number: int) -> None:
    texts = {name: Path(run, name).read_bytes() for name in (*_SYNCED, "status.json")}
    link = os.readlink(f"{run}/code")  # noqa: PTH115
    pickle = next(Path(run).parent.glob(".slurm/*/*_submitted.pkl")).read_bytes()
    os.makedirs(f"{folder}/.slurm")  # noqa: PTH103
    ids = [f"{each:010x}" for each in range(number)]
    for run_id in ids:
        hidden = f"{folder}/.{run_id}"
        os.mkdir(hidden)  # noqa: PTH102
        for name, text in texts.items():
            _write(f"{hidden}/{name}", text, sync=name in _SYNCED)
        os.symlink(link, f"{hidden}/code")  # noqa: PTH211
        _sync(hidden)
        os.rename(hidden, f"{folder}/{run_id}")  # noqa: PTH104
    _sync(folder)
    job = _sbatch(number)
    for task, run_id in enumerate(ids):
        _write(f"{folder}/.slurm/{job}_{task}_submitted.pkl", pickle)
        facts = json.loads(texts["run.json"]) | {"slurm_job_ids": [f"{job}_{task}"]}
        _write(f"{folder}/{run_id}/.run.json", json.dumps(facts, indent=1).encode(), sync=True)
        os.rename(f"{folder}/{run_id}/.run.json", f"{folder}/{run_id}/run.json")  # noqa: PTH104
        _sync(f"{folder}/{run_id}")


def _write(path: str, content: bytes, *, sync: bool = False) -> None:
    with open(path, "wb") as file:  # noqa: PTH123
        file.write(content)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _sbatch(number: int) -> str:
    array = [f"--array=0-{number - 1}"] if number > 1 else []
    command = ["sbatch", "--parsable", "--hold", "--output=/dev/null", *array, "--wrap=true"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def status(folder: str) -> None:
    command = ["squeue", "--noheader", "--array", "--Format=JobArrayID:|,State:|,Reason:|"]
    rows = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    jobs = {row.split("|")[0]: row.split("|")[1:3] for row in rows}
    for run_id in sorted(name for name in os.listdir(folder) if name[0] != "."):  # noqa: PTH208
        run = json.loads(_read(f"{folder}/{run_id}/run.json"))
        state = json.loads(_read(f"{folder}/{run_id}/status.json"))
        _read(f"{folder}/{run_id}/experiment.yaml")
        (job,) = run["slurm_job_ids"]
        print(run_id, run["name"], state["state"], state["step"], job, *jobs.get(job, ()))


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:  # noqa: PTH123
        return file.read()


if __name__ == "__main__":
    if sys.argv[1] == "submit":
        submit(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        status(sys.argv[2])
