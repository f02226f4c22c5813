"""Kills, full and failing disks while saving: a valid checkpoint is always found."""

import errno
import os
import random
import resource
import shutil
import signal
import time

import pytest
import torch

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
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it lives"
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_kills_while_saving(tmp_path):
    draw, cut, kills = random.Random(0), 0, 0
    while cut < 20:  # kills that strike inside of a save
        folder = tmp_path / str(kills)
        killed_while_saving(folder, 0.1 * draw.random())
        kills += 1
        cut += any(folder.glob(".*.tmp"))
        assert newest_valid(folder) is not None
        assert find_corruption(resolve_link(folder, "last")) is None
        shutil.rmtree(folder)
        assert kills < 400, cut


def test_a_full_disk(tmp_path):
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
    assert [m["failed"] for m in metrics(tmp_path) if m["split"] == "save"] == [1]
    assert find_corruption(first) is None
    assert toy_train(tmp_path).step == 10


def test_too_little_room(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(manifest.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(SaveError, match="MB needed, 0 MB free"):
        toy_train(tmp_path, max_steps=1)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_checkpoint_that_cannot_be_read(tmp_path, monkeypatch):
    toy_train(tmp_path, save_steps=5, keep=9)
    last, before = sorted((tmp_path / "checkpoints").glob("step-*"))[-1:-3:-1]
    whole = manifest.fingerprint

    def unreadable(file):
        if file.parent == last:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(file)

    monkeypatch.setattr(manifest, "fingerprint", unreadable)
    with pytest.warns(UserWarning, match="cannot be read: Input/output error"):
        assert newest_valid(tmp_path / "checkpoints") == before
