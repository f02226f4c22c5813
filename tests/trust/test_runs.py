"""A run is never silently restarted, or silently resumed with other data or another model."""

import shutil
from pathlib import Path

import pytest

from tests.common.small_runs import TINY, checkpoint, vil
from vil.engine.checkpoint import manager
from vil.engine.distributed import DistInfo
from vil.engine.run_dir import HELD, RunDir
from vil.utils.errors import RunInUseError

pytestmark = pytest.mark.trust(2)

USAGE, CHECKPOINT = 2, 4
SHORT = (*TINY, "OPTIM.EPOCHS=1", "DATALOADER.WORKERS=0")


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.mark.parametrize("flags", [(), ("--resume",)])
@pytest.mark.parametrize("gone", ["checkpoints", "checkpoints/step-*"])
def test_a_log_without_checkpoints_is_refused(run, flags, gone):
    for folder in run.glob(gone):
        shutil.rmtree(folder)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    ended = vil("train", "--output_dir", run, *SHORT, *flags)
    assert ended.code == CHECKPOINT
    assert "has the log of a run, but its checkpoints are gone: restore" in ended.err
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_a_run_that_ended_before_its_first_checkpoint_can_start_again(run):
    """As after a SIGKILL in the first epoch, by a scheduler that always adds --resume."""
    shutil.rmtree(run / "checkpoints")
    (run / "status.json").write_text('{"state": "running", "checkpoint": null}')
    assert vil("train", "--output_dir", run, *SHORT).code == USAGE
    ended = vil("train", "--output_dir", run, *SHORT, "--resume")
    assert ended.code == 0, ended.err
    assert "WARNING an earlier run ended before its first checkpoint" in ended.out


@pytest.mark.long
def test_a_deleted_best_checkpoint_is_replaced(tmp_path, monkeypatch):
    """Otherwise its value might never be reached again, and `best` would point to nothing."""
    run, save = tmp_path / "run", manager.save

    def save_and_lose(folder, *args, **kwargs):
        written = save(folder, *args, **kwargs)
        if written.name == "step-00000004":
            shutil.rmtree(written)
        return written

    monkeypatch.setattr(manager, "save", save_and_lose)
    ended = vil("train", "--output_dir", run, *SHORT, "OPTIM.EPOCHS=3", "OPTIM.LR=1e-9")
    assert ended.code == 0, ended.err
    log = (run / "log.txt").read_text()
    assert "ERROR the best checkpoint, " in log
    assert checkpoint(run, "best").is_dir()


def test_a_deleted_lock_does_not_let_a_second_run_in(tmp_path):
    import torch

    run, cpu = tmp_path / "run", torch.device("cpu")
    with RunDir(run, DistInfo(), cpu):
        (run / "run.lock").unlink()
        with pytest.raises(RunInUseError, match="in use by another process, whose run.lock was"):
            RunDir(run, DistInfo(), cpu)
    with RunDir(run, DistInfo(), cpu):
        assert Path(run, "run.lock").exists()


def test_workers_that_outlive_a_run_do_not_hold_its_lock(tmp_path):
    import os

    import torch

    killed = RunDir(tmp_path / "run", DistInfo(), torch.device("cpu"))
    started, start = os.pipe()
    ending, end = os.pipe()
    worker = os.fork()
    if not worker:
        os.write(start, b"x")
        os.read(ending, 1)
        os._exit(0)
    os.read(started, 1)
    try:
        killed.lock.close()
        os.close(killed.folder_lock)  # as when the process ends: nothing is unlocked
        HELD.clear()
        with RunDir(tmp_path / "run", DistInfo(), torch.device("cpu")):
            pass
    finally:
        os.write(end, b"x")
        os.waitpid(worker, 0)
