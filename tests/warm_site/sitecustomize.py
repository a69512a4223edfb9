"""Imported by each Python that a test's job or shell starts: what imports torch is forked (tests/warm.py)."""

import os
import sys

is_fresh = "HPC_TRAIN_TEST_FRESH_FIRST_ATTEMPT" in os.environ and "SLURM_RESTART_COUNT" not in os.environ
warm = {"submitit.core._submit", "hpc_train.launchers.entry", "hpc_train.training.checkpoint.export"}
if "HPC_TRAIN_TEST_WARM" in os.environ and not is_fresh and not warm.isdisjoint(sys.orig_argv):
    task = __file__.rpartition("/warm_site/")[0] + "/warm_task.py"
    os.execv(sys.executable, [sys.executable, "-I", "-S", task, *sys.orig_argv])
