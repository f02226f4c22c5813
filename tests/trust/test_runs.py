"""A run is never silently restarted, or silently resumed with other data or another model."""

import errno
import os
import shutil

import pytest
from PIL import Image

from tests.common.small_runs import SMALL, TINY, checkpoint, draw_pictures, vil
from vil.engine import run_dir
from vil.engine.checkpoint import manager
from vil.engine.distributed import DistInfo
from vil.engine.run_dir import RunDir
from vil.utils.errors import RunFolderError
from vil.workflows.configure import Options, run_config
from vil.workflows.inference import load_model

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


def resume(run, *words):
    """Resume for one more epoch."""
    return vil("train", "--output_dir", run, "--resume", "OPTIM.EPOCHS=2", *words)


@pytest.mark.parametrize("change", ["INPUT.IMAGE_SIZE: 32", "BSZ: 16"])
def test_an_edited_config_is_compared_with_the_checkpoint(run, change):
    file, (key, value) = run / "config.yaml", change.split(": ")
    name = key.split(".")[-1]
    file.write_text(file.read_text().replace(f"{name}: {value}\n", f"{name}: 8\n"))
    ended = resume(run)
    assert ended.code == CHECKPOINT, ended.err
    assert len(ended.err.splitlines()) == 1


def test_other_images_under_the_same_names_are_refused(tmp_path):
    run, photos = tmp_path / "run", tmp_path / "photos"
    for part in ("train", "val"):
        draw_pictures(photos / part, {"a": 8, "b": 8})
    words = (*SMALL, "DATA.TRAIN=[folder]", "DATA.TEST=[folder]", "DATA.NUM_CLASSES=2",
             f"DATA.PATH={photos}", "DATALOADER.WORKERS=0", "OPTIM.EPOCHS=1")  # fmt: skip
    assert vil("train", "--output_dir", run, *words).code == 0
    Image.new("RGB", (9, 9)).save(photos / "train/a/0.png")  # such as a repaired one
    ended = resume(run)
    assert ended.code == 0, ended.err
    assert "1 of 16 compared images have other content" in (run / "log.txt").read_text()
    for file in photos.glob("train/*/*.png"):
        Image.new("RGB", (9, 9), (int(file.stem), 0, 0)).save(file)
    ended = resume(run, "OPTIM.EPOCHS=3")
    assert ended.code == CHECKPOINT
    assert "compared images have other content under the same names: restore" in ended.err
    assert resume(run, "OPTIM.EPOCHS=3", "RUN.ALLOW_CHANGES=True").code == 0


def test_a_plugin_that_changed_since_the_run_started_is_named(tmp_path):
    run, file = tmp_path / "run", tmp_path / "plugin.py"
    file.write_text("")
    assert vil("train", "--output_dir", run, *SHORT, "--import", file).code == 0
    file.write_text("# changed\n")
    ended = resume(run, "--import", file)
    assert ended.code == 0, ended.err
    assert f"{file} has changed since step-" in (run / "log.txt").read_text()


def test_a_run_whose_folder_was_moved_ends(tmp_path):
    import torch

    with RunDir(tmp_path / "run", DistInfo(), torch.device("cpu")) as run:
        assert run.find_move() == ""
        (tmp_path / "run").rename(tmp_path / "moved")
        assert "was moved or removed" in run.find_move()
        (tmp_path / "run").mkdir()  # of another run
        with pytest.raises(RunFolderError, match="was moved or removed"):
            run.write("config.yaml", "")
    assert not any((tmp_path / "run").iterdir())


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_accepted(tmp_path, monkeypatch, number, caplog):
    import torch

    def unsupported(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_dir.fcntl, "lockf", unsupported)
    monkeypatch.setattr(run_dir.fcntl, "flock", unsupported)
    with RunDir(tmp_path / "run", DistInfo(), torch.device("cpu")) as run:
        assert not run_dir.is_locked(tmp_path / "run")
        assert run.find_move() == ""
    assert "cannot be locked" in caplog.text


def test_the_best_checkpoint_may_be_replaced_while_a_command_starts(run):
    """As by a run that still trains: the command loads the new one."""
    cfg, _ = run_config(run, Options())
    best = checkpoint(run, "best")
    best.rename(best.with_name("step-00000099"))
    (run / "checkpoints/best").write_text("step-00000099\n")
    assert "step-00000099" in load_model(cfg).report


def test_workers_that_outlive_a_run_do_not_hold_its_lock(tmp_path):

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
        killed.lock.close()  # as when the process ends
        with RunDir(tmp_path / "run", DistInfo(), torch.device("cpu")):
            pass
    finally:
        os.write(end, b"x")
        os.waitpid(worker, 0)
