"""What commands print with ``--json`` (a contract): each command's type, which is in its module.

``docs/make_json_page.py`` writes docs/json.md from these types and the comments above their fields; a test
compares real output with them. Nothing at run time needs this module.
"""

from __future__ import annotations

from typing import Any

from hpc_train.cli.bisect import Bisection
from hpc_train.cli.bundle import Bundled
from hpc_train.cli.clean import Cleaning, Removal
from hpc_train.cli.compare import Comparison, GroupComparison
from hpc_train.cli.compare_diff import Difference
from hpc_train.cli.doctor import Diagnosis
from hpc_train.cli.evaluate import Evaluation, Export, Predictions
from hpc_train.cli.init import FirstFileJson, Recipes
from hpc_train.cli.logs import Log
from hpc_train.cli.plan import PlanJson, StagesJson
from hpc_train.cli.report import Page
from hpc_train.cli.reproduce import Reproduced
from hpc_train.cli.run_row import Runs
from hpc_train.cli.sync import Synchronization
from hpc_train.cli.validate import Validation
from hpc_train.cli.verify import Verification
from hpc_train.report.replayed_steps import Replay
from hpc_train.training.prepare import Prepared

#: Command with its options → the type of what it prints.
SHAPES: dict[str, Any] = {
    "status": Runs,
    "submit": Runs,
    "resume": Runs,
    "cancel": Runs,
    "plan": PlanJson,
    "plan (of stages)": StagesJson,
    "validate": Validation,
    "doctor": Diagnosis,
    "compare": Comparison,
    "compare --over": GroupComparison,
    "compare --group-by": GroupComparison,
    "compare --diff": Difference,
    "sync": Synchronization,
    "evaluate": Evaluation,
    "verify": Verification,
    "clean": Cleaning,
    "rm": Removal,
    "export": Export,
    "predict": Predictions,
    "replay": Replay,
    "bisect": Bisection,
    "bundle": Bundled,
    "reproduce": Reproduced,
    "logs": Log,
    "report": Page,
    "init": FirstFileJson,
    "init --from list": Recipes,
    "prepare": Prepared,
}
