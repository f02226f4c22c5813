"""Faults around a run: a second run in its folder, a truncated log, and a batch that does not
divide."""

import json
import multiprocessing
import random
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.common.faults.real_runs import DEADLINE, begin, said, status, wait_for_end
from tests.common.faults.records import record
from tests.common.small_runs import (
    TINY,
    Outcome,
    checkpoint,
    command,
    environment,
    figures,
    free_port,
    metrics,
    vil,
)  # fmt: skip
from tests.common.toy_engine import toy_train
from vil.engine.run_dir import open_folder
from vil.utils.errors import RunInUseError

AROUND = str(Path(__file__).parents[1] / "common/faults/injected_around.py")
USAGE = 2
IN_USE = 9  # of a racer of these tests


def begin_with(folder, *words, **fault):
    """Start a run with a fault of injected_around.py."""
    return begin(folder, *words, "--import", AROUND, FAULT=json.dumps(fault))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    process = begin(folder, *TINY)
    wait_for_end(process)
    assert process.returncode == 0, said(folder)
    return folder


def outcome(folder):
    """Return what must be the same for every run: weights, metrics and the last step."""
    weights = (checkpoint(folder) / "model.safetensors").read_bytes()
    return weights, figures(metrics(folder)), status(folder)["step"]


# Two runs


def wait_for(file, process, folder):
    deadline = time.monotonic() + DEADLINE
    while not Path(file).exists():
        assert process.poll() is None, said(folder)
        assert time.monotonic() < deadline, said(folder)
        time.sleep(0.02)


def test_f24_a_second_run_in_the_folder(whole, tmp_path):
    """The first run waits at steps 1 and 6, before and after a checkpoint, for the others."""
    folder, gate = tmp_path / "used", tmp_path / "gate"
    process = begin_with(folder, *TINY, what="pause", file=str(gate), steps=(1, 6))
    refused = 0
    for step, flags in ((1, ([], ["--resume"])), (6, ([], ["--resume"]))):
        wait_for(f"{gate}.{step}.reached", process, folder)
        lines = [command("train", *TINY, "--output_dir", folder, *words) for words in flags]
        others = [subprocess.Popen(line, env=environment(), text=True, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE) for line in lines]  # fmt: skip
        for words, other in zip(flags, others):
            out, err = other.communicate(timeout=DEADLINE)
            holder = f"process {process.pid} on .*: choose another --output_dir"
            wanted = holder if words else f"({holder}|already holds a run: add --resume)"
            fits = re.fullmatch(rf"vil train: .*{wanted}.*\n", err) and not out
            refused += other.returncode == USAGE and bool(fits)
        for words in ([], ["--resume"]):
            ended = vil("train", *TINY, "--output_dir", folder, *words)
            refused += ended.code == USAGE and ended.err.count("\n") == 1
        Path(f"{gate}.{step}").touch()
    wait_for_end(process)
    record("F24", "runs refused because the folder is in use (of 8)", refused, 8)
    unharmed = process.returncode == 0 and outcome(folder) == outcome(whole)
    record("F24", "the first run ends like an undisturbed run", unharmed, True)


def race(folder, both):
    """Exit with 0 if this process gets the folder's lock; it keeps it until both have tried."""
    both.wait(DEADLINE)
    try:
        held = open_folder(folder)
    except RunInUseError:
        held = None
    both.wait(DEADLINE)
    raise SystemExit(IN_USE if held is None else 0)


def test_f24_a_hundred_races(tmp_path):
    one_winner = 0
    fork = multiprocessing.get_context("fork")
    for number in range(100):
        both = fork.Barrier(2)
        two = [fork.Process(target=race, args=(tmp_path / str(number), both)) for _ in range(2)]
        for racer in two:
            racer.start()
        for racer in two:
            racer.join()
        one_winner += sorted(racer.exitcode for racer in two) == [0, IN_USE]
    what = "pairs of simultaneous starts in which exactly one run gets the folder (of 100)"
    record("F24", what, one_winner, 100)


def refused(ended, code, pattern) -> bool:
    """Return whether the output is one line with the fix, and nothing else."""
    line = rf"vil train( \(rank \d\))?: .*{pattern}.*\n"
    fine = ended.code == code and not ended.out and bool(re.fullmatch(line, ended.err))
    if not fine:
        print(code, pattern, ended)
    return fine


def test_f25_a_batch_that_does_not_divide(tmp_path):
    """Two processes without a launcher: torchrun would stop the slower one before it reports."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    line = command("train", *TINY, "DATALOADER.BSZ=15", "--output_dir", tmp_path / "out")
    started = [
        subprocess.Popen(
            line, env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **meeting),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    ended = [(process.communicate(timeout=DEADLINE), process.returncode) for process in started]
    what = "DATALOADER.BSZ 15 is not divisible .*: set DATALOADER.BSZ to 14"
    told = sum(refused(Outcome(code, out, err), USAGE, what) for (out, err), code in ended)
    what = "ranks that suggest a valid batch size if theirs is not divisible (of 2)"
    record("F25", what, told, 2)
    assert not (tmp_path / "out").exists()


# A log that ends in the middle of a line


def readable(folder, last) -> bool:
    """Return whether every line is one object, no step of a split is repeated, and the last step is
    there."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = [(line["step"], line["split"]) for line in lines]
    return len(set(keys)) == len(keys) and keys == sorted(keys, key=lambda key: key[0]) and (
        last, "train") in keys  # fmt: skip


def test_f27_cut_by_hand(tmp_path):
    """A log cut anywhere, sometimes followed by zeros or noise, is readable after resuming."""
    run = tmp_path / "run"
    toy_train(run, log_freq=1, epochs=1)
    log, draw, fine = (run / "metrics.jsonl").read_bytes(), random.Random(0), 0
    for number in range(60):
        folder = tmp_path / str(number)
        shutil.copytree(run, folder)
        tail = draw.choice([b"", b"", b"\0" * 512, draw.randbytes(40), b"\n" + draw.randbytes(9)])
        (folder / "metrics.jsonl").write_bytes(log[: draw.randrange(len(log))] + tail)
        toy_train(folder, log_freq=1, epochs=2)
        fine += readable(folder, 10)
        shutil.rmtree(folder)
    what = (
        "logs truncated at a random byte: readable after resuming, without duplicate steps (of 60)"
    )
    record("F27", what, fine, 60)
