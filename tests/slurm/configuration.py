"""The files that a test cluster is configured by. For Slurm 22.05 to 26.05."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

NUM_NODES = 4
NODES = tuple(f"n{number}" for number in range(1, NUM_NODES + 1))
PARTITIONS = ("low", "high", "short")
GPUS_PER_NODE = 4
#: Beyond what the machine has: Slurm is told to believe it (config_overrides).
CPUS_PER_NODE = 8
_MAX_NODES = 8
#: Neighboring ports: slurmctld, slurmdbd and one per node.
NUM_PORTS = 2 + _MAX_NODES


@dataclass(frozen=True)
class Settings:
    """What differs between clusters.

    Seconds are so short that tests need not wait, and yet three times what a loaded machine of two cores was
    seen to need (a small run saves and leaves in 1-3 s; a slurmd answers within 1 s).
    """

    accounting: bool = True
    num_nodes: int = NUM_NODES
    #: From SIGTERM to SIGKILL at scancel, requeue, time limit, srun's --kill-on-bad-exit. Slurm's own: 30.
    kill_wait_s: int = 10
    #: From a node's last word to its being down, which takes up to half as long again. Slurm's own: 300.
    slurmd_timeout_s: int = 10
    #: How long a job waits that Slurm itself or somebody by hand has requeued, and a step's credential is
    #: valid. Slurm's own: 120.
    cred_expire_s: int = 30
    #: From preemption's SIGTERM to SIGKILL: ranks that save leave by themselves long before.
    grace_s: int = 60
    #: How long slurmctld remembers a job that has ended. Slurm's own: 300.
    min_job_age_s: int = 300
    max_array_size: int = 1001
    #: Jobs that slurmctld keeps, each task of an array counted. Slurm's own: 10000.
    max_job_count: int = 10_000
    #: A SPANK plug-in that srun and slurmd load; none if empty.
    plug_in: str = ""

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes."""
        assert self.num_nodes <= _MAX_NODES
        return [f"n{number}" for number in range(1, self.num_nodes + 1)]


# Without DefMemPerCPU a job takes all memory of its nodes, and no two share one.
# TCPTimeout and BatchStartTimeout are far above Slurm's own 2 and 10 s, which on a busy machine fail launches
# that were only slow. The scheduler and backfill run every second rather than each 60 and 30 s.
_SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={settings.cred_expire_s}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool/%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait={settings.kill_wait_s}
SlurmdTimeout={settings.slurmd_timeout_s}
SlurmctldTimeout=10
TCPTimeout=10
BatchStartTimeout=60
InactiveLimit=0
MinJobAge={settings.min_job_age_s}
MaxArraySize={settings.max_array_size}
MaxJobCount={settings.max_job_count}
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1,batch_sched_delay=0
{accounting}
PlugStackConfig={folder}/plugstack.conf
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[2]}-{last_port}] CPUs={cpus} \
RealMemory=20000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE \
GraceTime={settings.grace_s}
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=short Nodes=ALL MaxTime=00:10:00 State=UP PriorityTier=1
"""

# Enforced, so that unknown accounts and QOS are refused as on a site.
_WITH_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
AccountingStorageEnforce=associations,limits,qos
JobAcctGatherType=jobacct_gather/none"""

_DBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdPort={port}
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
"""


def write(folder: Path, settings: Settings, ports: list[int]) -> None:
    """Write a cluster's files and the folders that they name."""
    assert len(ports) == NUM_PORTS
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("state", "pids", "gpus", *(f"spool/{node}" for node in settings.nodes)):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    for number in range(GPUS_PER_NODE):
        # A device of any kind: for plain files Slurm sets no CUDA_VISIBLE_DEVICES.
        device = folder / "gpus" / f"gpu{number}"
        device.unlink(missing_ok=True)
        device.symlink_to("/dev/null")
    accounting = "AccountingStorageType=accounting_storage/none"
    if settings.accounting:
        accounting = _WITH_ACCOUNTING.format(folder=folder, port=ports[1])
        _write(folder / "slurmdbd.conf", _DBD_CONF.format(folder=folder, port=ports[1]), mode=0o600)
    values = {"nodes": settings.num_nodes, "cpus": CPUS_PER_NODE, "gpus": GPUS_PER_NODE}
    host = socket.gethostname().partition(".")[0]
    text = _SLURM_CONF.format(
        folder=folder, settings=settings, host=host, ports=ports, accounting=accounting,
        last_port=ports[1 + settings.num_nodes], **values,
    )  # fmt: skip
    _write(folder / "slurm.conf", text)
    _write(folder / "plugstack.conf", f"required {settings.plug_in}\n" if settings.plug_in else "")
    gpus = f"{folder}/gpus/gpu[0-{GPUS_PER_NODE - 1}]"
    _write(folder / "gres.conf", f"NodeName=n[1-{settings.num_nodes}] Name=gpu File={gpus}\n")


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file with this mode whatever the umask is: ordinary users read the configuration."""
    path.touch(mode=0o600)
    path.write_text(text)
    path.chmod(mode)
