"""Faults around a run: a second run in its folder, and a batch that does not divide."""

import multiprocessing
import re
import subprocess
from pathlib import Path

import pytest

from tests.common.faults.real_runs import (
    DEADLINE,
    begin,
    finish,
    said,
    status,
    wait_for_end,
    wait_until,
)
from tests.common.small_runs import (
    TINY,
    checkpoint,
    command,
    environment,
    figures,
    free_port,
    metrics,
    vil,
)
from vil.engine.run_dir import open_folder
from vil.utils.errors import RunInUseError

USAGE = 2
IN_USE = 9  # of a racer of these tests
PIPES = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    finish(folder, *TINY)
    return folder


def outcome(folder):
    """Return what must be the same for every run: weights, metrics and the last step."""
    weights = (checkpoint(folder) / "model.safetensors").read_bytes()
    return weights, figures(metrics(folder)), status(folder)["step"]


# Two runs


def test_a_second_run_in_the_folder(whole, tmp_path):
    """The first run waits at steps 1 and 6, before and after a checkpoint, for the others."""
    folder, gate = tmp_path / "used", tmp_path / "gate"
    process = begin(folder, *TINY, fault=dict(what="pause", file=str(gate), steps=(1, 6)))
    holder = f"process {process.pid} on .*: choose another --output_dir"
    for step in (1, 6):
        wait_until(Path(f"{gate}.{step}.reached").exists, process, folder)
        for words in ([], ["--resume"]):
            ended = vil("train", *TINY, "--output_dir", folder, *words)
            wanted = holder if words else f"({holder}|already holds a run: add --resume)"
            line = command("train", *TINY, "--output_dir", folder, *words)
            other = subprocess.run(line, env=environment(), timeout=DEADLINE, **PIPES)
            assert (ended.code, ended.err.count("\n")) == (USAGE, 1)
            assert (other.returncode, other.stdout) == (USAGE, "")
            assert re.fullmatch(rf"vil train: .*{wanted}.*\n", other.stderr)
        Path(f"{gate}.{step}").touch()
    wait_for_end(process)
    assert process.returncode == 0, said(folder)
    assert outcome(folder) == outcome(whole)


def race(folder, both):
    """Exit with 0 if this process gets the folder's lock; it keeps it until both have tried."""
    both.wait(DEADLINE)
    try:
        held = open_folder(folder)
    except RunInUseError:
        held = None
    both.wait(DEADLINE)
    raise SystemExit(IN_USE if held is None else 0)


def test_one_of_two_simultaneous_starts_gets_the_folder(tmp_path):
    fork = multiprocessing.get_context("fork")
    for number in range(50):
        both = fork.Barrier(2)
        two = [fork.Process(target=race, args=(tmp_path / str(number), both)) for _ in range(2)]
        for racer in two:
            racer.start()
        for racer in two:
            racer.join()
        assert sorted(racer.exitcode for racer in two) == [0, IN_USE]


def test_a_batch_that_does_not_divide(tmp_path):
    """Two processes without a launcher: torchrun would stop the slower one before it reports."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    line = command("train", *TINY, "DATALOADER.BSZ=15", "--output_dir", tmp_path / "out")
    started = [
        subprocess.Popen(line, env=environment(RANK=rank, LOCAL_RANK=rank, **meeting), **PIPES)
        for rank in ("0", "1")
    ]
    what = "DATALOADER.BSZ 15 is not divisible .*: set DATALOADER.BSZ to 14"
    for process in started:
        out, err = process.communicate(timeout=DEADLINE)
        assert (process.returncode, out) == (USAGE, "")
        assert re.fullmatch(rf"vil train( \(rank \d\))?: .*{what}.*\n", err)
    assert not (tmp_path / "out").exists()
