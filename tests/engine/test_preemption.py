"""A signal stops a run in good order on every rank. A run that hangs is ended and says where."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.common.class_task import ClassificationTask
from tests.common.toy_engine import CPU, ToyLoader, held_out, metrics, start, toy_train, weights
from tests.engine.test_early_stopping import scripted
from vil.engine.checkpoint import save_load
from vil.engine.checkpoint.save_load import newest_step, resolve_link
from vil.engine.preemption import REPEAT_SECONDS
from vil.utils.errors import StoppedError

CODES = {signal.SIGTERM: 75, signal.SIGUSR1: 75, signal.SIGHUP: 75, signal.SIGINT: 130}


def at(step, number=signal.SIGTERM):
    """What sends a signal to this process at a step."""

    def send(model, progress):
        if progress.step == step:
            os.kill(os.getpid(), number)

    return {"set_progress": send}


def status(folder):
    return json.loads((folder / "status.json").read_text())


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    toy_train(folder, ema=0.9)
    return folder


def assert_same_run(folder, other):
    for file in ("model.safetensors", "ema.safetensors"):
        ours, theirs = (weights(each, file) for each in (folder, other))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    names = ("step", "split", "loss", "top1", "lr")
    ours, theirs = ([[m.get(n) for n in names] for m in metrics(f)] for f in (folder, other))
    assert [m for m in ours if m[1] != "train"] == [m for m in theirs if m[1] != "train"]


@pytest.mark.usefixtures("heard_signals")
@pytest.mark.parametrize("number", CODES)
def test_a_signal_saves_at_the_end_of_the_step(number, straight, tmp_path):
    with pytest.raises(StoppedError, match=f"stopped by {number.name}") as caught:
        toy_train(tmp_path, ema=0.9, **at(6, number))
    assert caught.value.exit_code == CODES[number]
    assert newest_step(tmp_path / "checkpoints") == 7
    assert (status(tmp_path)["code"], status(tmp_path)["step"]) == (CODES[number], 7)
    assert "step 7 is saved, --resume continues" in (tmp_path / "log.txt").read_text()
    toy_train(tmp_path, ema=0.9)
    assert_same_run(tmp_path, straight)


@pytest.mark.usefixtures("heard_signals")
def test_a_library_that_replaces_handlers_in_c_loses_no_signal(tmp_path):
    """As LLVM does, which compiles for GPUs."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)

    def compile_and_stop(model, progress):
        if progress.step == 5:
            libc.signal(signal.SIGUSR1, int(signal.SIG_IGN))
        if progress.step == 6:
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(StoppedError, match="stopped by SIGUSR1"):
        toy_train(tmp_path, set_progress=compile_and_stop)
    assert newest_step(tmp_path / "checkpoints") == 7


def test_handlers_are_put_back(tmp_path):
    before = [signal.getsignal(number) for number in CODES]
    toy_train(tmp_path, max_steps=1)
    assert [signal.getsignal(number) for number in CODES] == before


def test_nohup_survives_a_closed_terminal(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert toy_train(tmp_path, **at(6, signal.SIGHUP)).step == 10
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


class SignalInEvaluation(ClassificationTask):
    """A signal comes between two batches of an evaluation, once."""

    def __init__(self, sent):
        sets = {"odd": held_out(361), "two": held_out(2)}
        super().__init__(device=CPU, num_classes=7, test_sets=sets, per_class=True)
        self.sent = sent

    def measure(self, model, name, between):
        def signal_then():
            if name == "two" and not self.sent:
                self.sent.append(os.kill(os.getpid(), signal.SIGTERM))
            between()

        return super().measure(model, name, signal_then)


def test_an_evaluation_is_broken_off_and_made_up_for(straight, tmp_path):
    sent = []
    with pytest.raises(StoppedError):
        toy_train(tmp_path, ema=0.9, task=SignalInEvaluation(sent))
    assert newest_step(tmp_path / "checkpoints") == 5
    assert [m["split"] for m in metrics(tmp_path)] == ["train"]
    toy_train(tmp_path, ema=0.9, task=SignalInEvaluation(sent))
    assert_same_run(tmp_path, straight)


def test_an_evaluation_after_resuming_at_the_last_step_is_saved(tmp_path):
    """And a line of it in metrics.jsonl that was written before a kill is replaced."""
    with pytest.raises(StoppedError):
        toy_train(tmp_path, task=scripted(50), **at(9))
    state = toy_train(tmp_path, task=scripted(60))
    assert (state.best, state.best_step, state.evaluated) == (60, 10, 10)
    assert resolve_link(tmp_path / "checkpoints", "best").name == "step-00000010"
    assert toy_train(tmp_path, task=scripted()) == state  # nothing to do

    with pytest.raises(StoppedError):
        toy_train(tmp_path / "killed", task=scripted(50), **at(9))
    (tmp_path / "killed/metrics.jsonl").write_text((tmp_path / "metrics.jsonl").read_text())
    toy_train(tmp_path / "killed", task=scripted(70))
    lines = [(m["step"], m["split"]) for m in metrics(tmp_path / "killed")]
    assert lines == [(5, "train"), (5, "val/odd"), (10, "train"), (10, "val/odd")]
    assert metrics(tmp_path / "killed")[-1]["top1"] == 70


def test_a_signal_before_the_first_step_saves_where_the_run_begins(tmp_path):
    class Early(ToyLoader):
        def batches(self, start, stop):
            os.kill(os.getpid(), signal.SIGUSR1)
            yield from super().batches(start, stop)

    with pytest.raises(StoppedError):
        toy_train(tmp_path, loader=Early())
    assert newest_step(tmp_path / "checkpoints") == 0
    assert toy_train(tmp_path).step == 10


def test_a_wait_for_data_is_broken_off(tmp_path):
    class Slow(ToyLoader):
        def batches(self, start, stop):
            for batch in super().batches(start, stop):
                if batch.step == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(30)
                yield batch

    with pytest.raises(StoppedError):
        toy_train(tmp_path, loader=Slow())
    assert newest_step(tmp_path / "checkpoints") == 3


@pytest.mark.long
def test_a_save_that_takes_longer_than_the_grace_is_finished(tmp_path, monkeypatch):
    def write(final, files, state, write=save_load.write):
        if state.step == 7:
            time.sleep(4)
        write(final, files, state)

    codes = []
    monkeypatch.setattr(save_load, "write", write)
    monkeypatch.setattr(os, "_exit", codes.append)
    with pytest.raises(StoppedError):
        toy_train(tmp_path, grace_seconds=2.0, **at(6))
    assert codes == []
    assert newest_step(tmp_path / "checkpoints") == 7


# ------------------------------------------------------------------------------------ what hangs


def hang(folder, **options):
    return start((str(folder), {"sleep_step": 3, **options}))


@pytest.mark.long  # it waits for twice the limit
def test_a_step_that_hangs_ends_the_process_and_names_the_line(tmp_path):
    process = hang(tmp_path, hang_seconds=3.0)  # more than a step takes under load
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 6, output
    assert "rank 0: no step in 3 s; its main thread is in fall_asleep" in output
    assert "fall_asleep" in (tmp_path / "crash/stacks-rank0.txt").read_text()
    assert (status(tmp_path)["state"], status(tmp_path)["code"]) == ("hung", 6)


@pytest.mark.long
@pytest.mark.parametrize("signals", [1, 2])
def test_a_hanging_process_that_is_asked_to_stop_goes_within_its_grace(signals, tmp_path):
    """Or at once, when it is asked again."""
    process = hang(tmp_path, grace_seconds=1.0 if signals == 1 else 60.0)
    deadline = time.monotonic() + 60
    while not (tmp_path / "asleep").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    if signals == 2:
        time.sleep(REPEAT_SECONDS + 0.2)
        process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 75, output
    assert ("no step within 1 s" if signals == 1 else "a second SIGTERM") in output


@pytest.mark.long
def test_a_hang_that_holds_pythons_lock_is_ended_too(tmp_path):
    code = (
        "import ctypes, sys; from pathlib import Path\n"
        "from vil.engine.preemption import PreemptionGuard\n"
        "from vil.engine.distributed import DistInfo\n"
        "with PreemptionGuard(DistInfo(), hang_seconds=1.0) as guard:\n"
        "    guard.watch(Path(sys.argv[1]), lambda *_: None)\n"
        "    ctypes.PyDLL(None).sleep(60)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
