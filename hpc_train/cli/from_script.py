"""The experiment file of ``init --from-script``, and the lines with which the script resumes exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_train.cli.first_file import CHANGE, DOCS, quoted
from hpc_train.console import one_line
from hpc_train.errors import UsageError
from hpc_train.workloads.script_survey import Script, survey

_COLUMN = 44
_GUIDE = f"{DOCS}/programs.md"


def read_script(path: Path) -> Script:
    """Return the facts about a script. Raises UsageError for one that runs of this folder can't start."""
    if path.suffix != ".py":
        command = "[bash, train.sh]" if path.suffix in {".sh", ".bash"} else "[./train, --steps=100]"
        raise UsageError(
            f"--from-script: {path} is not a Python file; for others write program: {{command: {command}}} "
            f"into a file yourself, see {_GUIDE}"
        )
    if path.is_absolute() or ".." in path.parts:
        raise UsageError(
            f"--from-script: {path}: write a path below this folder, since runs get its code: "
            f"`cd {path.resolve().parent}`, then `hpc-train init --from-script {path.name}`"
        )
    try:
        return survey(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"--from-script: {path}: {reason}; write the path of a script") from error
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UsageError(f"--from-script: {path}{line}: is not Python: {error}; fix the script") from error


def script_file(name: str, path: Path, script: Script, output: Path, *, for_cluster: bool) -> str:
    """Return the text of the file, without the cluster's section."""
    shown, where = one_line(str(output)), "" if for_cluster else " --local"
    lines = [
        f"# {one_line(str(path))} as a program, written by `hpc-train init --from-script`.",
        f"# All keys: {_GUIDE}",
        "#",
        f"#   hpc-train validate {shown}",
        f"#   hpc-train submit {shown}{where}",
        f"name: {quoted(name)}",
        "program:",
        *(f"  {line}" for line in _program(path, script)),
        *_sweep(script),
    ]
    return "\n".join(lines) + "\n"


def _program(path: Path, script: Script) -> Iterator[str]:
    arguments = [*script.arguments, *(name.upper() for name in script.positional)]
    change = f"{CHANGE}: arguments that the script requires" if script.positional else ""
    yield _line(f"command: {quoted(['python', str(path), *arguments])}", change)
    if script.starts_ranks:
        yield _line("per: node", "the script starts its ranks itself")
    if script.style != "--key=value":
        yield _line(f"style: {script.style}", "as Hydra reads it")
    yield from _args(script)
    if script.outputs:
        yield _line(f"outputs: {quoted(script.outputs)}", "each run has its own")
    else:
        yield "# outputs: [out]  # folders and files that the script writes: each run has its own"
    if script.resume is not None:
        checkpoint, arguments = script.resume
        yield "resume:"
        yield _line(f"  if_exists: {quoted(checkpoint)}", "the script's own checkpoint")
        yield f"  args: {quoted(arguments)}"
    else:
        yield "# resume: {if_exists: out/checkpoint.pt, args: [--resume]}  # for a script that can continue"
    if script.regex is not None:
        regex = script.regex.replace("'", "''")
        yield f"metrics: {{regex: '{regex}'}}"
    else:
        yield r"# metrics: {regex: 'step (?P<step>\d+).*loss (?P<loss>[-+.\deE]+|nan|inf)'}  # of its output"


def _args(script: Script) -> Iterator[str]:
    if not script.args and not script.required:
        example = "learning_rate: 1e-4" if script.style == "--key=value" else "optimizer.lr: 1e-4"
        yield f"# args: {{{example}}}  # options of the script that this file sets"
        return
    yield "args:"
    for name in script.required:
        yield _line(f"  {name}: {quoted(name.upper())}", f"{CHANGE}: the script requires it")
    for name, value in script.args.items():
        yield _line(f"  {name}: {quoted(value)}", "the seed of this file" if value == "{seed}" else "")


def _sweep(script: Script) -> Iterator[str]:
    rates = [name for name in script.args if "lr" in name or "rate" in name]
    tuned = [*rates, *(name for name, value in script.args.items() if value != "{seed}")]
    for name in tuned[:1]:
        values = [script.args[name], script.args[name] * 2]
        yield ""
        yield f"# sweep: {{grid: {{program.args.{name}: {quoted(values)}}}}}"


def _line(text: str, comment: str) -> str:
    return f"{text:<{_COLUMN}} # {comment}" if comment else text


def job_values(script: Script, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cluster's section: one rank per node if the script starts ranks, one if it uses one."""
    if script.starts_ranks:
        return {**values, "ranks_per_node": 1}
    if script.is_distributed or not values.get("gpus_per_node"):
        return dict(values)
    return {**values, "gpus_per_node": 1}


_RESUMES = "with these lines it saves when it is asked to stop, and resumes exactly:"
#: Library that owns the loop → the lines of its adapter, after the imports and in the calls.
_ADAPTERS = {
    "Lightning": (
        "from hpc_train.session.lightning import SessionCallback, SessionEnvironment, latest",
        "Trainer(…, callbacks=[SessionCallback()], plugins=[SessionEnvironment()])",
        "trainer.fit(…, ckpt_path=latest())",
    ),
    "Hugging Face": (
        "from hpc_train import session",
        "from hpc_train.session.transformers import SessionCallback",
        "Trainer(…, callbacks=[SessionCallback()])",
        "trainer.train(resume_from_checkpoint=session.latest())",
    ),
}


def session_lines(path: Path, script: Script) -> list[str]:
    """Return the lines to add to the script, with their places, with which it saves and resumes exactly."""
    if adapter := _ADAPTERS.get(script.library or ""):
        return [f"{path}: {_RESUMES}", *(f"    {line}" for line in adapter)]
    if not script.step_line:
        how = f"{script.library} owns the loop" if script.library else "no optimizer.step() in a loop"
        return [f"{path}: {how}; {_GUIDE} shows how it saves when it is asked to stop"]
    step = script.step_name
    return [
        f"{path}: {_RESUMES}",
        f"  after line {script.import_line}:",
        "    from hpc_train import session",
        f"  before line {script.loop_line}, whose first step is then start + 1:",
        "    start = session.load_state(model=model, optimizer=optimizer)",
        f"  after line {script.step_line}; {step}: the steps done in all epochs, from 1:",
        f"    session.log({step}, loss=loss.item())",
        f"    if session.end_step({step}):",
        "        raise SystemExit" if script.is_nested else "        break",
    ]
