"""`vil tune`, what runs make of its choices, and that all ranks and restarts agree."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import vil as package
from tests.common.backends import restored_backends
from tests.common.native_cache import cache_with_library
from tests.common.small_runs import TINY, torchrun, vil
from vil.config import get_config
from vil.ops import BACKENDS
from vil.ops.dispatch import CHOICES
from vil.ops.native import library
from vil.workflows.attention_backend import backend_requests
from vil.workflows.execution import execution_of

RESIDUAL = "linear layer and residual"
WRONG = """
import torch
from vil.ops import BACKENDS, LocalBias, register_backend

def attend(q, k, v, window, *, bias, **rest):
    table = bias.table + 0.01 * (bias.table - bias.table.detach())
    biased = LocalBias(table, bias.to_global)
    return BACKENDS["chunk_autograd"].attend(q, k, v, window, bias=biased, **rest)

register_backend("mine", attend, about="as an example")
"""
# Both ranks have choices of their own, which contradict each other; each says what it took.
TWO_MINDS = """
import atexit, os
from pathlib import Path
from vil.ops import dispatch

rank = int(os.environ["RANK"])
os.environ["VIL_CACHE"] = f"FOLDER/cache{rank}"
Path("FOLDER", f"cache{rank}").mkdir()
Path("FOLDER", f"cache{rank}/native").symlink_to(os.environ["VIL_TEST_NATIVE"])  # compiled once
atexit.register(lambda: Path(f"FOLDER/rank{rank}.txt").write_text(str(dispatch.CHOICES)))
"""


@pytest.fixture(autouse=True)
def own_tables(monkeypatch, tmp_path):
    monkeypatch.setenv("VIL_CACHE", cache_with_library(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    CHOICES.clear()
    with restored_backends():
        yield
    CHOICES.clear()


def tune(*words):
    return vil("tune", "--rounds", "1", *words, *TINY, "MODEL.VIT.MSVIT.MODE=1")


@pytest.mark.long
def test_every_stage_is_listed_in_training_and_evaluation_and_info_says_so(tmp_path):
    code, out, _ = tune()
    assert code == 0
    stages = re.findall(r"^stage 1: 8 x 8 tokens, w 3, (.*)$", out, re.MULTILINE)
    assert stages == [
        "all nine chunks, training",
        "the self chunk and one neighbor, training",
        "all nine chunks, evaluation",
    ]
    linears = re.findall(r"^stage \d: ((?:norm|linear) .*)$", out, re.MULTILINE)
    phases = () if library.obstacle() else ("training", "evaluation")
    assert linears == [
        f"{name} of {tokens} tokens, {dim} to {times * dim} channels, {phase}"
        for tokens, dim in ((1040, 16), (272, 32))
        for phase in phases
        for name, times in (
            ("norm and linear layer", 3),
            ("linear layer" if (dim, phase) == (32, "training") else RESIDUAL, 1),
            ("norm and MLP", 4),
        )
    ]
    for name in BACKENDS:
        attempts = 3 + len(linears) * (name == "native")
        assert len(re.findall(rf"^  {re.escape(name)} ", out, re.MULTILINE)) == attempts
    assert len(re.findall(r"^  torch ", out, re.MULTILINE)) == len(linears)
    choices = 3 + len(linears)
    assert out.count("<- chosen") == choices
    assert "only the exact window" in out, "the reasons of the others"
    assert f"{choices} selected backends saved in {tmp_path / 'cache' / 'attention.json'}" in out
    CHOICES.clear()
    shown = vil("info", "--all", *TINY, "MODEL.VIT.MSVIT.MODE=1").out
    assert shown.count("chosen, tuned") == 3
    assert "3 of 3 attention calls have a tuned backend" in shown


def test_a_wrong_backend_of_ones_own_is_named(tmp_path):
    (tmp_path / "mine.py").write_text(WRONG)
    arch = "MODEL.VIT.MSVIT.ARCH=l1,h1,d16,n1,s1,g1,p4,f3,a0"
    code, out, _ = tune("--import", "mine.py", "--backends", "mine,masked", arch)
    assert code == 0
    wrong = r"^  mine +wrong: grad of table is off by 1\.0e-02"
    assert len(re.findall(wrong, out, re.MULTILINE)) == 2, "training, with both windows"
    assert "<- chosen" in out


def test_a_model_without_windows_has_nothing_to_tune():
    words = (*TINY, "MODEL.VIT.MSVIT.ATTN_TYPE=full")
    code, out, _ = vil("tune", *words, "--backends", "blocked")
    assert (code, out) == (0, "no stage has longformer attention: nothing to tune\n")
    if not library.obstacle():
        code, out, _ = vil("tune", "--rounds", "1", *words)
        assert code == 0
        kinds = "norm and linear layer, linear layer, MLP"
        assert out.count("<- chosen") == 12, f"{kinds} of two stages, in both phases"


@pytest.mark.long
def test_a_run_tunes_at_its_start_and_keeps_what_it_chose(tmp_path):
    words = (*TINY, "OPTIM.EPOCHS=1", "MODEL.VIT.MSVIT.TUNE=True")
    code, out, err = vil("train", "--output_dir", "run", *words)
    assert code == 0, err
    kept = json.loads((tmp_path / "run/autotune.json").read_text())
    linears = [bucket for bucket in kept if re.match("mlp |.*linear ", bucket)]
    assert len(linears) == (0 if library.obstacle() else 12)
    assert kept.pop("default") == "native"
    assert len(kept) == 2 + len(linears)
    assert set(kept.values()) <= {*BACKENDS, "torch"}
    assert "training: timing the backends" in out
    assert ", tuned" in out
    assert (tmp_path / "cache/attention.json").is_file(), "the user's other runs know it too"
    # keeps the choices that it started with, whatever was tuned meanwhile
    begun = {bucket: "native" if bucket in linears else "gathered" for bucket in kept}
    (tmp_path / "run/autotune.json").write_text(json.dumps(begun))
    out = vil("train", "--output_dir", "run", "--resume", "OPTIM.EPOCHS=2").out
    assert ": gathered, as before" in out
    assert "linear layers and MLPs: native for 6 of 6 in training" in out or not linears
    assert "timing the backends" not in out


def test_a_run_of_an_earlier_version_keeps_the_backends_that_it_began_with(trained):
    """Then `native` was used only where it was tuned, and only such calls were recorded."""
    shutil.copytree(trained, "run", symlinks=True)
    file = Path("run/autotune.json")
    began = json.loads(file.read_text())
    first = asked(*TINY)[0].case.bucket()
    file.write_text(json.dumps({first: "gathered"}))
    assert vil("train", "--output_dir", "run", "--resume", "OPTIM.EPOCHS=2").code == 0
    kept = json.loads(file.read_text())
    assert (kept.pop("default"), kept.pop(first)) == ("", "gathered")
    assert kept.keys() | {"default", first} == began.keys()
    assert "native" not in kept.values()


def test_a_choice_of_a_run_that_cannot_be_used_is_a_warning(trained):
    """The backend of one is gone, the file of the other is damaged, and its backend is pinned."""
    shutil.copytree(trained, "gone", symlinks=True)
    kept = {a.case.bucket(): "mine" for a in asked(*TINY)}
    Path("gone/autotune.json").write_text(json.dumps(kept))
    said = resume("gone")
    assert "the tuned backend mine is not used: no backend has this name" in said
    shutil.copytree(trained, "damaged", symlinks=True)
    Path("damaged/autotune.json").write_text("{")
    said = resume("damaged", "MODEL.VIT.MSVIT.TUNE=True", "MODEL.VIT.MSVIT.BACKEND=gathered")
    assert "autotune.json, which lists the attention backends of this run, is ignored" in said
    assert "TUNE has no effect: the config already selects the backend gathered" in said


def resume(run, *words):
    outcome = vil("train", "--output_dir", run, "--resume", "OPTIM.EPOCHS=2", *words)
    assert outcome.code == 0, outcome.err
    return outcome.out + outcome.err


def asked(*words, world=1, training=True):
    cfg = get_config(None, words)
    execution = execution_of(cfg, torch.device("cpu"), world)
    return backend_requests(package.build_model(cfg), execution, training=training)


@pytest.mark.long
def test_all_ranks_take_what_rank_0_chose(tmp_path):
    (tmp_path / "minds.py").write_text(TWO_MINDS.replace("FOLDER", str(tmp_path)))
    line = ("train", "--output_dir", str(tmp_path / "run"), "--import", str(tmp_path / "minds.py"))
    torchrun(2, (*line, *TINY, "OPTIM.EPOCHS=1", "MODEL.VIT.MSVIT.TUNE=True"))
    taken = [(tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1)]
    assert taken[0] == taken[1]
    assert "training" in taken[0]
    assert not (tmp_path / "cache1/attention.json").exists(), "rank 1 measures nothing"
