"""Write the batch script that runs a sweep as a SLURM job array, and submit the script.

Each task of the array trains one run with `vil sweep --task N`. Two minutes before its time limit,
or when it is preempted, the run saves its state and the task is requeued.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from vil.utils.atomic_write import replace_text
from vil.utils.errors import ConfigError, os_error_as

SCRIPT = """\
#!/usr/bin/env bash
# One run of the sweep in {folder} per task. Written by vil sweep --slurm; submit it with sbatch.
#SBATCH --job-name={name}
#SBATCH --array={tasks}
#SBATCH --ntasks=1
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output="{folder}/output/slurm-%A_%a.txt"
{options}set -uo pipefail
cd {cwd}
{command} --task "$SLURM_ARRAY_TASK_ID" &
run=$!
trap 'kill -TERM $run' USR1 TERM
code=0
while kill -0 $run 2>/dev/null; do   # a signal ends the wait, not the run
    wait $run && code=0 || code=$?
done
if [ $code = 75 ] || [ $code = 143 ]; then   # saved, or stopped before there was anything to save
    echo "back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def format_script(
    folder: Path,
    tasks: Sequence[int],
    *,
    options: str = "",
    jobs: int | None = None,
    num_processes: int = 1,
) -> str:
    """Return the text of the sbatch script that trains a sweep's runs as a job array.

    tasks: numbers of the runs to train. options: options of sbatch, such as "--gres=gpu:1
    --time=2:00:00". jobs: maximum number of tasks that run at the same time. num_processes: number
    of processes of each run. Raises ConfigError if `options` has a word that is neither an option
    nor a value.
    """
    folder = folder.resolve()
    command = [sys.executable, "-m", "vil", "sweep", "--output", str(folder)]
    command += ["--nproc", str(num_processes)]
    return SCRIPT.format(
        folder=folder,
        name=re.sub(r"[^\w.-]", "_", folder.name),
        tasks=ranges(tasks) + (f"%{jobs}" if jobs else ""),
        options="".join(f"#SBATCH {word}\n" for word in sbatch_options(options)),
        cwd=shlex.quote(os.getcwd()),
        command=shlex.join(command),
    )


def write_script(folder: Path, text: str) -> Path:
    """Write the text of a SLURM script to <folder>/sweep.sbatch. Returns the path."""
    with os_error_as(ConfigError, f"--output {folder}"):
        replace_text(folder / "sweep.sbatch", text)
    return folder / "sweep.sbatch"


def sbatch_options(text: str) -> list[str]:
    """Split text into options of sbatch, each with its value, such as "--gres=gpu:1" or "-p long".
    Raises ConfigError for a word that is neither an option nor a value."""
    options: list[str] = []
    try:
        words = shlex.split(text)
    except ValueError as error:  # a quote without its end
        raise ConfigError(f"--slurm {text!r}: {error}") from None
    for word in words:
        if word.startswith("-"):
            options.append(word)
        elif options and "=" not in options[-1] and " " not in options[-1]:
            options[-1] += f" {shlex.quote(word)}"
        else:
            raise ConfigError(f"--slurm {text!r}: expected options of sbatch, got {word!r}")
    return options


def ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers for sbatch's option --array. For example, 0, 1, 2, 5 is "0-2,5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans)


def submit(script: Path) -> str | None:
    """Submit a SLURM script with sbatch. Returns the job number, or None if this machine has no
    sbatch. If sbatch fails, raises ConfigError with the error message of sbatch."""
    if shutil.which("sbatch") is None:
        return None
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(
            f"sbatch {script}: {done.stderr.strip() or f'exit code {done.returncode}'}"
        )
    return done.stdout.strip().partition(";")[0]
