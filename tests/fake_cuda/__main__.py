"""Runs a command with the device of ``tests.fake_cuda``: ``python -m tests.fake_cuda python -m pytest …``."""

from __future__ import annotations

import os
import sys

from tests.fake_cuda import environment, why_not

if problem := why_not():
    sys.exit(f"no stand-in for CUDA: {problem}")
os.environ.update(environment())
os.execvp(sys.argv[1], sys.argv[1:])
