"""Kills, corruption, full and failing disks while saving: a valid checkpoint is always found."""

import errno
import os
import random
import resource
import shutil
import signal
import time

import pytest
import torch

from tests.common.faults.records import record
from tests.common.toy_engine import metrics, toy_model, toy_optimizer, toy_train
from vil.engine.checkpoint import manifest
from vil.engine.checkpoint.save_load import (
    TrainObjects,
    TrainState,
    find_corruption,
    newest_valid,
    resolve_link,
    save,
)
from vil.engine.distributed import DistInfo
from vil.utils.errors import SaveError

SCALER = torch.amp.GradScaler("cpu", enabled=False)


def save_for_ever(folder):
    """Save checkpoints until the process is killed."""
    model = toy_model()
    optimizer = toy_optimizer(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    objects = TrainObjects(model, optimizer, SCALER)
    for step in range(1, 10_000):
        now = TrainState(
            0, 1, 8, 5, "AdamW", step=step, best=float(step), best_step=step - step % 3
        )
        save(folder, objects, now, dist=DistInfo(), keep=2)


def killed_while_saving(folder, seconds):
    """Fork this process, which has imported torch, and kill the child `seconds` after its first
    checkpoint."""
    child = os.fork()
    if child == 0:
        try:
            save_for_ever(folder)
        finally:
            os._exit(1)
    while not (folder / "last").exists():
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_f1_a_hundred_kills_while_saving(tmp_path):
    draw, found, unreadable, cut = random.Random(0), 0, 0, 0
    for number in range(100):
        folder = tmp_path / str(number)
        killed_while_saving(folder, 0.1 * draw.random())
        cut += any(folder.glob(".*.tmp"))  # the kill struck inside of a save
        found += newest_valid(folder) is not None
        last = resolve_link(folder, "last")
        unreadable += last is None or find_corruption(last) is not None
        shutil.rmtree(folder)
    record("F1", "restarts that find a valid checkpoint (of 100)", found, 100)
    record("F1", "kills that leave `last` unreadable", unreadable, 0)
    record("F1", "kills during a save", cut, "30 or more", kept=cut >= 30)


def test_f9_flipped_bits_and_cut_files(tmp_path):
    toy_train(tmp_path, save_steps=1, keep=9)
    last, before = sorted((tmp_path / "checkpoints").glob("step-*"))[-1:-3:-1]
    files, draw, found = sorted(last.iterdir()), random.Random(0), 0
    for number in range(120):
        file = draw.choice(files)
        whole = file.read_bytes()
        place = draw.randrange(len(whole))
        if number < 100:
            changed = bytearray(whole)
            changed[place] ^= 1 << draw.randrange(8)
            file.write_bytes(changed)
        else:
            file.write_bytes(whole[:place])
        with pytest.warns(UserWarning, match=f"{last.name} skipped"):
            found += newest_valid(tmp_path / "checkpoints") == before
        file.write_bytes(whole)
    assert newest_valid(tmp_path / "checkpoints") == last
    what = "corruptions detected, previous checkpoint used (100 flipped bits, 20 truncated files)"
    record("F9", what, found, 120)


def test_f10_a_full_disk(tmp_path):
    """Files must be smaller than the first checkpoint's state.pt, so writing fails."""
    toy_train(tmp_path, max_steps=1)
    first = resolve_link(tmp_path / "checkpoints", "last")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (first / "state.pt").stat().st_size - 1
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        with pytest.raises(SaveError, match="the checkpoint of step 10 was not written"):
            toy_train(tmp_path, save_steps=5, max_failed_saves=5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    failures = [m["failed"] for m in metrics(tmp_path) if m["split"] == "save"]
    record("F10", "training continues without the new checkpoint", failures == [1], True)
    record("F10", "the previous checkpoint is intact", find_corruption(first) is None, True)
    assert toy_train(tmp_path).step == 10


def test_f10_too_little_room(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(manifest.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(SaveError, match="MB needed, 0 MB free"):
        toy_train(tmp_path, max_steps=1)
    left = list((tmp_path / "checkpoints").iterdir())
    record("F10", "a checkpoint that does not fit leaves no files behind", left == [], True)


def test_f31_a_checkpoint_that_cannot_be_read(tmp_path, monkeypatch):
    toy_train(tmp_path, save_steps=5, keep=9)
    last, before = sorted((tmp_path / "checkpoints").glob("step-*"))[-1:-3:-1]
    whole = manifest.fingerprint

    def unreadable(file):
        if file.parent == last:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(file)

    monkeypatch.setattr(manifest, "fingerprint", unreadable)
    with pytest.warns(UserWarning, match="cannot be read: Input/output error"):
        found = newest_valid(tmp_path / "checkpoints")
    record("F31", "an unreadable checkpoint is skipped", found == before, True)
