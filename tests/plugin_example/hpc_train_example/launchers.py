"""``torchrun``: the elastic agent of torch starts the ranks, which meet at MASTER_ADDR and MASTER_PORT."""

import os
import subprocess
import sys
from collections.abc import Callable

from hpc_train.plugins import ExitCode, Experiment, LaunchRequest


class TorchrunLauncher:
    def choose_devices(self, devices: int | None, experiment: Experiment) -> int:
        return devices or 1

    def launch(self, request: LaunchRequest, poll: Callable[[], None]) -> ExitCode:
        command = [
            sys.executable, "-m", "torch.distributed.run",
            "--standalone", "--nproc-per-node", str(request.devices),
            "-m", "hpc_train.launchers.entry", str(request.paths.folder),
        ]  # fmt: skip
        environment = os.environ | {"HPC_TRAIN_ATTEMPT": str(request.attempt)}
        with request.paths.attempt(request.attempt).log(0).open("ab") as log:
            agent = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            while agent.poll() is None:
                poll()
                try:
                    agent.wait(0.1)
                except subprocess.TimeoutExpired:
                    continue
        return ExitCode.DONE if agent.returncode == 0 else ExitCode.FAILED
