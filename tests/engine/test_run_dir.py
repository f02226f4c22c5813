"""The files of a run's folder: logs, metrics, status, lock."""

import json
import subprocess
import sys

import pytest

from tests.common.toy_engine import CPU, metrics, toy_train
from vil.engine.distributed import DistInfo
from vil.engine.logger import RunLogger
from vil.engine.run_dir import RunDir
from vil.utils.errors import DataError

pytestmark = pytest.mark.smoke

METRICS = {"loss": 2.30259, "top1": 12.5, "time": 0.25, "data": 0.01}


def opened(folder, step=0):
    log = RunLogger(folder, enabled=True)
    log.begin(step, 100, steps_per_epoch=20, batch_size=16)
    return log


def test_resuming_drops_later_lines_and_a_torn_one(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = opened(tmp_path)
    for step in (10, 20, 30, 40):
        log.training(step, 0.1, {**METRICS, "loss": float(step)})
    log.metrics.write('{"step": 15, "epo')
    log.close()
    log = opened(tmp_path, step=20)
    for step in (30, 40):
        log.training(step, 0.1, {**METRICS, "loss": -float(step)})
    log.close()
    expected = [(10, 10), (20, 20), (30, -30), (40, -40)]
    assert [(m["step"], m["loss"]) for m in metrics(tmp_path)] == expected
    events = EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("loss/train")
    assert [(event.step, event.value) for event in events] == expected


@pytest.mark.parametrize(
    "tail", [b"\0" * 4096, b"\xff\xfe\n\x80", b'{"step": "x"}\n1\n{"st', b"[" * 9999]
)
def test_incomplete_log_lines_of_a_crash_are_dropped(tmp_path, tail):
    log = opened(tmp_path)
    log.training(10, 0.1, METRICS)
    log.close()
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes() + tail)
    opened(tmp_path, step=10).close()
    assert [m["step"] for m in metrics(tmp_path)] == [10]


def test_only_rank_0_writes(tmp_path):
    folder = tmp_path / "run"
    with RunDir(folder, DistInfo(1, 2, 1), CPU) as run:
        run.begin()
        run.log.begin(0, 10, steps_per_epoch=5, batch_size=8)
        run.log.say("unheard")
        run.tick(1)
        run.log.training(1, 0.1, METRICS)
        run.log.evaluation(1, {"set": {"top1": 1.0}})
        run.status("running")
    assert not folder.exists()


ENDINGS = [
    (None, "finished", 0, ""),
    (DataError("no images"), "failed", 3, "DataError: no images"),
    (KeyError("x"), "failed", 1, "KeyError: 'x'"),
    (KeyboardInterrupt(), "interrupted", 130, "Ctrl-C"),
]


@pytest.mark.parametrize(("error", "state", "code", "reason"), ENDINGS, ids=lambda e: repr(e)[:20])
def test_the_status_has_the_outcome_of_a_run(tmp_path, error, state, code, reason):
    def read():
        return json.loads((tmp_path / "status.json").read_text())

    def end():
        with RunDir(tmp_path, DistInfo(), CPU) as run:
            run.begin()
            assert (read()["state"], read()["code"]) == ("running", None)
            run.tick(3)
            if error is not None:
                raise error

    if error is None:
        end()
    else:
        with pytest.raises(type(error)):
            end()
    status = read()
    assert [status[k] for k in ("state", "code", "step", "reason")] == [state, code, 3, reason]


def test_commands_and_versions_are_kept_for_every_start(tmp_path):
    for _ in range(2):
        with RunDir(tmp_path, DistInfo(), CPU) as run:
            run.begin()
    environment = (tmp_path / "env.txt").read_text()
    assert environment.count("\ntorch ") == environment.count("\ngit ") == 2
    assert (tmp_path / "command.txt").read_text().count(sys.argv[0]) == 2


def test_a_run_starts_while_another_process_looks_at_its_lock(tmp_path, monkeypatch):
    (tmp_path / "run.lock").touch()
    code = "import fcntl, sys; f = open(sys.argv[1], 'a+'); fcntl.lockf(f, 2); print(); input()"
    words = [sys.executable, "-c", code, str(tmp_path / "run.lock")]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as looks:
        looks.stdout.readline()  # it holds the lock, and lets go at the first wait
        monkeypatch.setattr("vil.engine.run_dir.time.sleep", lambda s: looks.communicate("\n"))
        with RunDir(tmp_path, DistInfo(), CPU):
            assert looks.returncode == 0


def test_a_folder_on_another_disk_is_fine(tmp_path):
    (tmp_path / "large").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "large")
    toy_train(tmp_path / "run")
    assert (tmp_path / "large/last").is_file()


def test_a_full_disk_costs_the_log_and_not_the_run(tmp_path, capsys):
    """/dev/full fails every write like a full disk."""
    log = RunLogger(tmp_path, enabled=True)
    log.text.close()
    log.text = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    log.say("one")
    log.say("two")
    log.close()
    told = capsys.readouterr()
    assert [line.split()[-1] for line in told.out.splitlines()] == ["one", "two"]
    assert told.err.count("the log cannot be written: [Errno 28] No space left on device") == 1
