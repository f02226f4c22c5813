"""The files of a run's folder: logs, metrics, status, lock."""

import json
import math
import os
import re
import subprocess
import sys

import pytest

from tests.common.toy_engine import CPU, metrics, toy_train
from vil.engine.distributed import DistInfo
from vil.engine.logger import RunLogger
from vil.engine.run_dir import RunDir
from vil.utils.errors import DataError, RunFolderError
from vil.utils.metric_format import format_pairs

pytestmark = pytest.mark.smoke

METRICS = {"loss": 2.30259, "top1": 12.5, "time": 0.25, "data": 0.01}


def opened(folder, step=0):
    log = RunLogger(folder, enabled=True)
    log.begin(step, 100, steps_per_epoch=20, batch_size=16)
    return log


def test_names_are_written_alike_in_every_locale(tmp_path):
    """Those that are not UTF-8, too: with the bytes they were read with."""
    log = RunLogger(tmp_path, enabled=True)
    log.say("Äpfel \udce4")
    log.close()
    assert (tmp_path / "log.txt").read_bytes().endswith(b" \xc3\x84pfel \xe4\n")
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code = "import sys, pathlib; from vil.utils.atomic_write import replace_text\n"
    code += 'replace_text(pathlib.Path(sys.argv[1]), "\\xc4pfel \\udce4\\n")'
    words = [sys.executable, "-c", code, tmp_path / "classes.txt"]
    subprocess.run(words, env={**os.environ, **ascii_alone}, check=True)
    assert (tmp_path / "classes.txt").read_bytes() == b"\xc3\x84pfel \xe4\n"


def test_a_log_line_is_pairs_in_a_fixed_order_behind_a_time_stamp(tmp_path):
    log = opened(tmp_path)
    log.training(30, 5e-4, {**METRICS, "grad_norm": 1.5})
    log.close()
    (line,) = (tmp_path / "log.txt").read_text().splitlines()
    stamp, split, *words = line.split(" ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", stamp)
    assert split == "train"
    found = dict(zip(words[::2], words[1::2]))
    assert float(found.pop("mem")) > 0
    assert found == {
        "epoch": "1.50/5",
        "step": "30/100",
        "eta": "0:00:18",
        "loss": "2.3026",
        "top1": "12.50",
        "grad_norm": "1.5",
        "lr": "5.000e-04",
        "time": "0.250",
        "data": "0.010",
        "img/s": "64.0",
    }
    assert list(found)[:4] == ["epoch", "step", "eta", "loss"]


def test_an_evaluation_has_a_line_per_test_set_and_no_tables(tmp_path):
    log = opened(tmp_path)
    sets = {"a": {"top1": 50.0, "per_class": {"right": [1]}}, "b": {"top1": math.nan}}
    log.evaluation(20, sets)
    log.close()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        "val epoch 1.00/5 step 20/100 set a top1 50.00",
        "val epoch 1.00/5 step 20/100 set b top1 nan",
    ]
    assert [(m["split"], m["top1"]) for m in metrics(tmp_path)] == [("val/a", 50), ("val/b", None)]


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
    "tail", [b"\0" * 4096, b"\xff\xfe\n\x80", b'{"step": "x"}\n1\n', b"[" * 9999]
)
def test_incomplete_log_lines_of_a_crash_are_dropped(tmp_path, tail):
    log = opened(tmp_path)
    log.training(10, 0.1, METRICS)
    log.close()
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes() + tail)
    opened(tmp_path, step=10).close()
    assert [m["step"] for m in metrics(tmp_path)] == [10]


def test_a_terminal_gets_a_bar_and_the_same_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    log = opened(tmp_path)
    log.tick(1)
    log.say("[bold] and :smile: stay as they are")
    log.close()
    assert "[bold] and :smile: stay" in capsys.readouterr().out
    assert "[bold] and :smile: stay" in (tmp_path / "log.txt").read_text()


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


def test_numbers_without_a_format_of_their_own_are_short():
    assert format_pairs({"loss": 1, "grad_norm": 0.123456}) == "loss 1.0000 grad_norm 0.1235"


def test_precision_is_written_like_accuracy_and_parts_of_a_loss_like_the_loss():
    found = {"box_ap": 0.0, "mask_ap50": 41.256, "box_ar100": math.nan, "loss_mask": 0.69314}
    assert format_pairs(found) == "box_ap 0.00 mask_ap50 41.26 box_ar100 nan loss_mask 0.6931"


def test_the_curves_of_a_detector(tmp_path):
    """A metric that is null has no point."""
    from vil.report.curves import draw, group_curves
    from vil.report.run_record import metrics as read_metrics

    lines = [
        {"step": 1, "epoch": 0.5, "split": "train", "loss": 2.0, "loss_mask": 0.5, "lr": 0.1},
        {"step": 2, "epoch": 1.0, "split": "val/scenes", "box_ap": 3.0, "mask_ap": None},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = draw(tmp_path)
    assert [file.name for file in files] == ["loss.png", "precision.png", "losses.png", "lr.png"]
    points = read_metrics(tmp_path / "metrics.jsonl")
    plots = {plot: curves for plot, _, curves in group_curves(points)}
    assert plots["precision"]["val/scenes"] == [(1.0, 3.0)]


def test_the_curves_are_drawn_from_what_a_run_logged(tmp_path):
    from vil.report.curves import draw

    toy_train(tmp_path, draw=draw)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "epo')
    files = draw(tmp_path)
    assert [file.name for file in files] == ["loss.png", "accuracy.png", "lr.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


@pytest.mark.parametrize("name", ["run.lock", "log.txt", "crash/stacks-rank0.txt"])
def test_a_link_to_a_file_elsewhere_is_refused(tmp_path, name):
    folder, victim = tmp_path / "run", tmp_path / "victim"
    (folder / "crash").mkdir(parents=True)
    (folder / name).symlink_to(victim)
    for content in (None, "mine"):
        if content:
            victim.write_text(content)
        with pytest.raises(RunFolderError, match=f"{name} is a link, .*: remove the link"):
            RunDir(folder, DistInfo(), CPU)
    assert victim.read_text() == "mine"


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


def test_a_log_that_cannot_be_opened_leaves_no_lock(tmp_path):
    (tmp_path / "log.txt").mkdir()
    with pytest.raises(RunFolderError, match="log.txt cannot be written: Is a directory"):
        RunDir(tmp_path, DistInfo(), CPU)
    (tmp_path / "log.txt").rmdir()
    with RunDir(tmp_path, DistInfo(), CPU):
        pass


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


def test_what_a_full_disk_refuses_is_named(tmp_path, monkeypatch, capsys):
    def full(path, text):
        raise OSError(28, "No space left on device")

    with RunDir(tmp_path, DistInfo(), CPU) as run:
        monkeypatch.setattr("vil.engine.run_dir.replace_text", full)
        with pytest.raises(RunFolderError, match=r"config\.yaml cannot be written: No space left"):
            run.write("config.yaml", "text")
        run.status("running")
    assert "status.json cannot be written: No space left" in capsys.readouterr().err
