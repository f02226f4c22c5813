"""A component is one file: from outside of the package it trains, resumes bit for bit, and is a
choice in the config, its docs and its error messages."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vil
from tests.common.doc_pages import PythonBlocks
from tests.common.native_cache import cache_with_library
from tests.common.small_runs import TINY, Outcome
from vil.config import plugins
from vil.utils.errors import ConfigError
from vil.workflows.configure import make_config

FILE = Path(__file__).with_name("my_components.py")
MSVIT = "MODEL.VIT.MSVIT"
KINDS = {  # the settings that select a component, and the name that must be a choice
    "attention": ([f"{MSVIT}.ATTN_TYPE=halved", f"{MSVIT}.HALVED_FACTOR=0.7"], "halved"),
    "backend": ([f"{MSVIT}.BACKEND=spelled_out"], "spelled_out"),
    "optimizer": (["OPTIM.OPT=sign_sgd", "OPTIM.SIGN.BETA=0.8", "OPTIM.LR=1e-3"], "sign_sgd"),
    "schedule": (["SOLVER.LR_POLICY=square_root"], "square_root"),
    "loss": (["LOSS.LOSS=squared", "LOSS.SQUARED_WEIGHT=3.0"], "squared"),
    "transform": (["AUG.TRANSFORM=dim", "AUG.DIM.STRENGTH=0.8"], "dim"),
    "dataset": (["DATA.TRAIN=[grays]", "DATA.TEST=[grays]"], "grays"),
    "task": (["TASK=brightness", "BRIGHTNESS.SCALE=2.0"], "brightness"),
}
PYTHON = """
import os
os.environ |= {kept!r}
import vil
result = vil.train(None, {words!r}, output_dir="python", imports=[{file!r}])
assert result.status == "finished" and result.metrics
"""
COMMAND = """
import contextlib, io, json, os
os.environ |= {kept!r}
from vil.cli import main
out, err = io.StringIO(), io.StringIO()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    code = main({words!r})
with open("ended.json", "w") as file:
    json.dump([code, out.getvalue(), err.getvalue()], file)
"""


@pytest.fixture(scope="module")
def forks():
    """Code runs in forks of one process: a component stays registered."""
    started = PythonBlocks()
    yield started
    started.close()


def run(*words, cwd, **environment):
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip


def weights(folder):
    last = folder / "checkpoints" / (folder / "checkpoints/last").read_text().strip()
    return (
        json.loads((last / "manifest.json").read_text())["step"],
        [line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"train"' in line],
        (last / "model.safetensors"),
    )


def same_tensors(one, other):
    from safetensors.torch import load_file

    ours, theirs = load_file(one), load_file(other)
    return ours.keys() == theirs.keys() and all(ours[k].equal(theirs[k]) for k in ours)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_resumes_and_is_a_choice(kind, forks, tmp_path):
    def command(*given):
        code = COMMAND.format(kept=kept, words=[str(word) for word in given])
        assert forks.run([("command", code)], tmp_path) == "done"
        return Outcome(*json.loads((tmp_path / "ended.json").read_text()))

    settings, name = KINDS[kind]
    words = [*TINY, *settings, "OPTIM.EPOCHS=2", "SOLVER.WARMUP_EPOCHS=0", "LOG_FREQ=1"]
    kept = dict(COMPONENTS=kind, VIL_CACHE=cache_with_library(tmp_path / "cache"))
    code = PYTHON.format(kept=kept, words=words, file=str(FILE))
    answer = forks.run([("vil.train", code)], tmp_path)
    assert answer == "done", answer
    # the command, one epoch and then the other, by the file that its config records
    train = ("train", "--output_dir", "command")
    first = command(*train, "--import", FILE, *words, "RUN.SAVE_STEPS=3")
    assert first.code == 0, first.err
    assert f"IMPORTS: [{FILE}]" in (tmp_path / "command/config.yaml").read_text()
    assert same_tensors(weights(tmp_path / "python")[2], weights(tmp_path / "command")[2])
    forget_the_end(tmp_path / "command")
    again = command(*train, "--resume")
    assert again.code == 0, again.err
    assert "resuming from" in again.out
    assert same_tensors(weights(tmp_path / "python")[2], weights(tmp_path / "command")[2])
    ended = command("evaluate", "--run", "command")
    assert ended.code == 0, ended.err
    if kind == "task":  # it has only what a task must have
        assert command("report", "command").code == 0
        for words in (["analyze", "--config-file", "command/config.yaml"],
                      ["predict", "--run", "command", "--sample"]):  # fmt: skip
            refused = command(*words)
            assert (refused.code, "TASK brightness" in refused.err) == (2, True), refused.err
    wrong = settings[0].replace(name, "nothing_such")
    refused = command("train", "--import", FILE, *TINY, wrong)
    assert refused.code == 2
    assert name in refused.err


def forget_the_end(folder):
    """As if the run had been killed in the middle: the newest checkpoint is gone."""
    import shutil

    checkpoints = sorted((folder / "checkpoints").glob("step-*"))
    assert len(checkpoints) > 1
    shutil.rmtree(checkpoints[-1])
    for link in ("last", "best"):
        (folder / "checkpoints" / link).write_text(f"{checkpoints[-2].name}\n")


def test_a_config_of_somebody_else_runs_no_code(tmp_path):
    """Its file runs only if this user has named it before."""
    (tmp_path / "evil.py").write_text("open('ran', 'w')\n")
    (tmp_path / "theirs.yaml").write_text(f"IMPORTS: [{tmp_path}/evil.py]\n")
    words = ("-m", "vil", "config", "--config-file", "theirs.yaml")
    kept = dict(cwd=tmp_path, VIL_CACHE=str(tmp_path / "cache"))
    refused = run(*words, **kept)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert "theirs.yaml:1: IMPORTS" in refused.stderr
    assert "add --import" in refused.stderr
    assert not (tmp_path / "ran").exists()
    assert run(*words, "--import", "evil.py", **kept).returncode == 0
    assert run(*words, **kept).stderr == ""
    assert (tmp_path / "ran").exists()
    with (tmp_path / "evil.py").open("a") as file:
        file.write("# changed\n")
    for flags, lines in (((), 1), ((), 1), (("--import", "evil.py"), 0), ((), 0)):
        ended = run(*words, *flags, **kept)
        assert ended.returncode == 0
        assert ended.stderr.count("has changed since you passed it with --import") == lines
        assert ended.stderr.count("\n") == lines


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("vil.register_optimizer('mine', lambda groups, settings: None)", "optimizer 'mine'"),
        ("vil.register_optimizer('sgd', print)", "already exists"),
        ("vil.register_attention('mine', object)", "must be a subclass of"),
        ("vil.register_loss('mine', lambda x, y, z: x)", "must return a scalar"),
        ("vil.register_task('mine', object)", "must be a subclass of vil.tasks.base.Task"),
        ("vil.register_schedule('mine', lambda: 1)", "schedule 'mine'"),
        ("vil.register_dataset('mine', lambda: 1)", "dataset 'mine'"),
        ("vil.register_transform('mine', lambda image: image)", "transform 'mine'"),
    ],
)
def test_a_broken_component_is_refused_at_registration(code, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        exec(code, {"vil": vil})


def install(folder, source, entry):
    """Install a module `my_plugin` with an entry point."""
    (folder / "my_plugin-1.dist-info").mkdir(parents=True)
    (folder / "my_plugin.py").write_text(source)
    (folder / "my_plugin-1.dist-info/METADATA").write_text("Name: my_plugin\nVersion: 1\n")
    (folder / "my_plugin-1.dist-info/entry_points.txt").write_text(f"[vil.plugins]\n{entry}\n")


@pytest.mark.parametrize("code", ["undefined_name", "raise RuntimeError('a\\nb')"])
def test_a_broken_plugin_is_named(code, tmp_path, monkeypatch):
    """Whatever it raises, when it is imported or called."""
    called = f"VIL_PLUGIN_API = 1\ndef register():\n    {code}\n"
    for number, (source, entry) in enumerate(((code, "my_plugin"), (called, "my_plugin:register"))):
        install(tmp_path / str(number), source, f"broken = {entry}")
        monkeypatch.setattr(plugins, "_loaded", {})
        monkeypatch.delitem(sys.modules, "my_plugin", raising=False)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path / str(number))
            with pytest.raises(ConfigError, match=r"^plug-in broken: \w+Error: "):
                make_config()


@pytest.mark.long
@pytest.mark.parametrize(("version", "code"), [("1", 0), ("2", 2)])
def test_an_installed_plugin(version, code, tmp_path):
    """Found by its entry point; of another version of the interface it is refused."""
    source = FILE.read_text().replace("VIL_PLUGIN_API = 1", f"VIL_PLUGIN_API = {version}")
    install(tmp_path / "site", source, "mine = my_plugin:register")
    path = os.pathsep.join([str(tmp_path / "site"), os.environ["PYTHONPATH"]])
    words = ("-m", "vil", "config", "OPTIM.OPT=sign_sgd")
    ended = run(*words, cwd=tmp_path, PYTHONPATH=path, COMPONENTS="optimizer")
    assert ended.returncode == code, ended.stderr
    if code:
        assert "plug-in mine: it has VIL_PLUGIN_API 2" in ended.stderr
    else:
        assert "plugin:mine" in ended.stdout
