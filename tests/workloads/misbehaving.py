"""A program that misbehaves as ``--behave`` names it, after its first row."""

import argparse
import ctypes
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

parser = argparse.ArgumentParser()
parser.add_argument("--behave")
behavior = parser.parse_args().behave


def become_a_daemon() -> None:
    if os.fork() != 0:
        os._exit(0)
    os.setsid()


print("step 1: loss 1.0", flush=True)
if behavior == "leaves servers":
    server = [sys.executable, "-c", "import signal; signal.pause()"]
    subprocess.Popen(server)
    subprocess.Popen(server, start_new_session=True, env={})
    if os.fork() == 0:
        become_a_daemon()
        signal.pause()
elif behavior == "becomes a daemon":
    become_a_daemon()
    signal.pause()
elif behavior == "forks":
    if (child := os.fork()) == 0:
        print("step 2: loss 2.0", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
elif behavior == "writes NaN":
    for step, loss in enumerate(("nan", "inf", "-inf", "1e999", "0.5"), start=2):
        print(f"step {step}: loss {loss}", flush=True)
elif behavior == "ends short":
    from hpc_train import session

    session.progress(7, 20)
elif behavior == "changes its folder":
    os.chdir("/")
    pathlib.Path(os.environ["HPC_TRAIN_RUN"], "seen").write_text(pathlib.Path.cwd().as_posix())
elif behavior == "deletes its folder":
    shutil.rmtree(pathlib.Path.cwd())
elif behavior == "closes stdout":
    os.close(1)
    os.close(2)
    time.sleep(0.2)
    os._exit(0)
elif behavior == "writes binary":
    os.write(1, bytes(range(256)) * 100 + b"\nstep 2: loss 2.0\n")
elif behavior == "starts threads":
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(1000)]
    for thread in threads:
        thread.start()
    done.set()
elif behavior == "leaves by _exit":
    print("step 2: loss 2.0", flush=True)
    os._exit(0)
elif behavior.startswith("exits with "):
    print("the last line", flush=True)
    os._exit(int(behavior.removeprefix("exits with ")))
elif behavior == "crashes in C":
    ctypes.string_at(0)
elif behavior == "raises":
    raise ValueError("a bad batch")
elif behavior == "hangs in C":
    ctypes.PyDLL(None).sleep(600)  # holds the interpreter's lock
elif behavior in {"ignores SIGTERM", "starts a server"}:
    if behavior == "starts a server":
        server = [sys.executable, "-c", "import signal; signal.pause()"]
        subprocess.Popen(server, start_new_session=True, env={})
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("step 2: loss 2.0", flush=True)
    while True:
        signal.pause()
elif behavior == "handles SIGTERM":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    print("step 2: loss 2.0", flush=True)
    signal.pause()
elif behavior == "saves when asked":
    from hpc_train import session

    while not session.should_stop(1):
        time.sleep(0.05)
    time.sleep(0.3)  # a shell in front of it would be gone
    with session.checkpoint(1) as folder:
        (folder / "state").touch()
    print("saved", flush=True)
