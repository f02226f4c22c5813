"""A real SLURM controller and daemon on this machine: a job near its time limit saves, requeues
itself, and ends with the weights of an undisturbed run.

Needs Debian's slurm-wlm and munge, and root. A job that was put back waits for two minutes.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.common.faults.real_runs import LAUNCHER, status
from tests.common.small_runs import TINY, checkpoint, environment

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(
        os.geteuid() != 0 or not (shutil.which("slurmctld") and shutil.which("munged")),
        reason="needs root, slurm-wlm and munge",
    ),
]
ROOT = Path(__file__).parents[2]
LONG = (*TINY, "OPTIM.EPOCHS=200", "RUN.SAVE_EVERY=200", "RUN.EVAL_EVERY=100")
DEADLINE = 300
CONFIG = """\
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
JobRequeue=1
NodeName={host} CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment in which SLURM's commands find a cluster of one node."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    facts = dict(host=host, ports=free_ports(3), folder=folder, cpus=os.cpu_count())
    (folder / "slurm.conf").write_text(CONFIG.format(**facts))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
    environ = environment(
        SLURM_CONF=str(folder / "slurm.conf"), PATH=path, MASTER_PORT=str(facts["ports"][2])
    )
    munge = [f"--{what}={folder}/{name}" for what, name in (
        ("key-file", "munge.key"), ("socket", "munge"), ("pid-file", "munged.pid"),
        ("log-file", "munged.log"), ("seed-file", "munged.seed"),
    )]  # fmt: skip
    daemons = [
        subprocess.Popen(command, env=environ)
        for command in (["munged", "--foreground", "--force", *munge], ["slurmctld", "-D"])
    ]
    time.sleep(2)
    daemons.append(subprocess.Popen(["slurmd", "-D"], env=environ))
    try:
        wait_until(lambda: "idle" in ask(environ, "sinfo", "-h"), 30)
        yield environ
    finally:
        ask(environ, "scancel", "--full", "--signal=KILL", "--user=root")
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(20)


def ask(environ, *command):
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    return done.stdout + done.stderr


def wait_until(what, seconds):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_job_is_warned_saves_waits_and_ends_as_if_nothing_had_been(slurm, tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "job"
    line = [*LAUNCHER, "-m", "vil", "train", *LONG, "--output_dir", str(whole)]
    subprocess.run(line, env=environment(), check=True, capture_output=True, timeout=DEADLINE)

    words = ["--export=ALL,NPROC=2", "--cpus-per-task=2", str(ROOT / "scripts/train_slurm.sh")]
    answer = subprocess.run(
        ["sbatch", "--parsable", *words, "--output_dir", str(folder), *LONG],
        env=slurm, cwd=tmp_path, check=True, capture_output=True, text=True,
    )  # fmt: skip
    job = answer.stdout.strip()
    wait_until(lambda: status(folder).get("state") == "running", 60)
    time.sleep(3)
    ask(slurm, "scancel", "--signal=USR1", "--batch", job)  # as SLURM does, by --signal=B:USR1@120
    wait_until(lambda: status(folder).get("code") == 75, 60)
    assert 0 < status(folder)["step"] < 800
    wait_until(lambda: status(folder).get("state") == "finished", DEADLINE)
    assert "Restarts=1" in ask(slurm, "scontrol", "show", "job", job)
    log = next(tmp_path.glob(f"vil-{job}.log")).read_text()
    assert "checkpoint saved; requeuing the job" in log
    assert f"resuming from {folder}/checkpoints/step-" in log
    ours, theirs = (load_file(checkpoint(run) / "model.safetensors") for run in (folder, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_sweep_is_an_array_whose_tasks_are_requeued(slurm, tmp_path):
    words = [*LONG, "SEED=[0, 1]", "--slurm=--cpus-per-task=1"]
    line = [sys.executable, "-m", "vil", "sweep", "--output", "s"]
    done = subprocess.run(
        [*line, *words], env=slurm, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    job = re.search(r"Submitted batch job (\d+)", done.stdout)[1]
    runs = [tmp_path / f"s/runs/seed_{seed}" for seed in (0, 1)]
    log = tmp_path / "s/runs/seed_1/metrics.jsonl"
    wait_until(lambda: log.exists() and log.read_text().count("\n") > 2, 120)
    ask(slurm, "scancel", "--signal=USR1", "--batch", f"{job}_1")
    wait_until(lambda: status(runs[1]).get("code") == 75, 60)
    assert 0 < status(runs[1])["step"] < 800
    wait_until(lambda: all(status(run).get("state") == "finished" for run in runs), DEADLINE)
    assert "back into the queue" in (tmp_path / f"s/output/slurm-{job}_1.txt").read_text()
    assert "resuming from" in (tmp_path / "s/output/seed_1.txt").read_text()


def test_the_script_says_how_it_is_used(tmp_path):
    done = subprocess.run(
        [ROOT / "scripts/train_slurm.sh"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "sbatch scripts/train_slurm.sh --config-file" in done.stderr
    assert "submit this script with sbatch, and set --output_dir" in done.stderr
