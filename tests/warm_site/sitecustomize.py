"""Imported by each Python that a test's job starts: a rank is forked, not started (tests/warm.py)."""

import os
import sys
from pathlib import Path

if "HPC_TRAIN_TEST_WARM" in os.environ and "submitit.core._submit" in sys.orig_argv:
    warm = str(Path(__file__).parents[1] / "warm.py")
    os.execv(sys.executable, [sys.executable, "-I", "-S", warm, "task", *sys.orig_argv])
