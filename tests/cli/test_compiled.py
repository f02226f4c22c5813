"""MODEL.COMPILE: the same names, the same numbers, and a reason where it cannot be."""

import functools

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.common.small_runs import TINY, checkpoint, metrics, vil

WORDS = (*TINY, "OPTIM.EMA=0.9", "OPTIM.EPOCHS=1", "MODEL.VIT.DROP_PATH=0.2")
FILES = ("model.safetensors", "ema.safetensors")


def weights(folder, *words):
    ended = vil("train", *WORDS, *words, "--output_dir", folder)
    assert ended.code == 0, ended.err
    return [load_file(checkpoint(folder) / file) for file in FILES]


@pytest.fixture
def traced(monkeypatch):
    """torch.compile traces, and computes as ever: what comes out must be the same to the bit."""
    plain, seen = nn.Module.compile, []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(plain, backend=backend))
    yield seen
    torch.compiler.reset()


@pytest.mark.long
def test_a_compiled_run_computes_what_a_plain_one_does(traced, tmp_path, monkeypatch):
    """In random shift, whose evaluation has all nine chunks."""
    # torch.compile computes linear layers itself, which differs in the last bits
    monkeypatch.setattr("vil.ops.linear_case.by_rule", lambda case: "torch")
    keys = ("MODEL.VIT.MSVIT.MODE=1",)
    plain = weights(tmp_path / "plain", *keys)
    assert not traced
    compiled = weights(tmp_path / "compiled", *keys, "MODEL.COMPILE=true")
    assert traced
    for mine, theirs in zip(compiled, plain, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    ended = vil("evaluate", "--run", tmp_path / "compiled")
    assert f"top1 {metrics(tmp_path / 'plain', 'val/fake')[-1]['top1']:.2f}" in ended.out


def test_without_a_compiler_it_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr("vil.workflows.prepare.has_compiler", lambda device: False)
    ended = vil("train", *WORDS, "MODEL.COMPILE=true", "--output_dir", tmp_path / "run")
    assert ended.code == 2
    assert "MODEL.COMPILE needs a C++ compiler (CXX or g++)" in ended.err
    assert not (tmp_path / "run").exists()
