"""Weights that are not finite are refused, and a model card builds no model it likes."""

import copy
import json
import pickle
import re
import resource
import subprocess
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vil
from tests.common.small_runs import TINY, command, environment
from tests.common.small_runs import vil as run_vil
from vil.pretrained.state_dict_io import read_metadata, read_weights, write_weights
from vil.utils.errors import CheckpointError

CHECKPOINT = 4


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory):
    """A file of weights with its model card."""
    file = tmp_path_factory.mktemp("saved") / "model.safetensors"
    assert run_vil("convert", trained, file).code == 0
    return file


def commands(weights):
    given = f"MODEL.MODEL_PATH={weights}"
    return {
        "evaluate": ("evaluate", *TINY, given),
        "predict": ("predict", "--sample", *TINY, given),
        "export": ("export", "--out", weights.parent / "x.pt2", *TINY, given),
        "train": ("train", "--output_dir", weights.parent / "run", *TINY, given),
        "convert": ("convert", weights, weights.parent / "again.safetensors"),
        "visualize": ("visualize", "attention", "test:0", *TINY, given),
    }


# Class 5: weights that are not finite


@pytest.mark.trust(5)
@pytest.mark.parametrize("name", ["evaluate", "predict", "export", "train", "convert", "visualize"])
def test_weights_that_are_not_finite_are_refused(saved, tmp_path, name):
    state = load_file(saved)
    state["head.weight"][1, 2] = float("inf" if name == "predict" else "nan")
    file = tmp_path / "bad.safetensors"
    write_weights(file, state, read_metadata(saved))
    ended = run_vil(*commands(file)[name])
    assert ended.code == CHECKPOINT, ended.err
    assert "head.weight" in ended.err
    assert ended.err.count("not finite") == 1
    with pytest.raises(CheckpointError, match="head.weight has NaN or infinite values"):
        vil.from_pretrained(file)


@pytest.mark.trust(5)
@pytest.mark.parametrize("name", ["predict", "embed"])
def test_outputs_that_are_not_finite_are_errors(saved, tmp_path, name):
    """Finite weights of which the products overflow."""
    state = load_file(saved)
    key = "head.weight" if name == "predict" else "norm.weight"
    state[key] = state[key].sign() * 3e38
    file, out = (
        tmp_path / "huge.safetensors",
        tmp_path / ("x.csv" if name == "predict" else "x.npy"),
    )
    write_weights(file, state, read_metadata(saved))
    given = (*TINY, f"MODEL.MODEL_PATH={file}", "DATALOADER.WORKERS=0")
    ended = run_vil(name, "--sample", *given, "--output-file", out)
    assert ended.code == 3, ended.err
    assert "none of the" in ended.err.splitlines()[-1]
    predictions = list(vil.predict(file, [np.zeros((32, 32, 3), np.uint8)], {"DEVICE": "cpu"}))
    if name == "predict":
        assert "NaN or infinite" in predictions[0].error


@pytest.mark.trust(5)
def test_a_streamed_output_that_is_not_finite_is_an_error(saved, tmp_path):
    state = load_file(saved)
    state["head.weight"] = state["head.weight"].sign() * 3e38
    file = tmp_path / "huge.safetensors"
    write_weights(file, state, read_metadata(saved))
    Image.new("RGB", (64, 64), (9, 90, 200)).save(tmp_path / "a.png")
    ended = run_vil("predict", "--stream", tmp_path / "a.png", *TINY, f"MODEL.MODEL_PATH={file}")
    assert ended.code == 3, ended.err
    assert "NaN or infinite" in ended.out


# Class 5: tensors that hold no value for each element

ODD = {
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "sparse": lambda x: x.to_sparse(),
    "compressed rows": lambda x: x.to_sparse_csr(),
    "meta": lambda x: x.to("meta"),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "complex": lambda x: x.to(torch.complex64),
    "expanded": lambda x: torch.zeros(1).expand_as(x),
    "a trillion": lambda x: torch.zeros(1).expand(10**6, 10**6),
}


@pytest.mark.trust(7)
@pytest.mark.parametrize("change", ODD.values(), ids=ODD)
def test_tensors_that_are_not_ordinary_are_refused(saved, tmp_path, change):
    state = load_file(saved)
    file = tmp_path / "odd.pth"
    torch.save({"state_dict": state | {"head.weight": change(state["head.weight"])}}, file)
    ended = run_vil("evaluate", *TINY, f"MODEL.MODEL_PATH={file}")
    assert ended.code == CHECKPOINT, ended.err
    assert "head.weight is" in ended.err
    assert ended.err.count("\n") == 1


class Bytes:
    """A pickle of a few bytes that becomes a gigabyte."""

    def __reduce__(self):
        return bytearray, (10**9,)


@pytest.mark.trust(7)
@pytest.mark.parametrize("method", ["deflated", "repeated", "a bytearray", "another archive"])
def test_a_file_that_takes_more_memory_than_its_size_is_refused(saved, tmp_path, method):
    file = tmp_path / "bomb.pth"
    torch.save(load_file(saved) | {"x": torch.zeros(10**6)}, file)
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    compression = zipfile.ZIP_DEFLATED if method == "deflated" else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in entries.items():
            is_pickle = method == "a bytearray" and name.endswith("data.pkl")
            archive.writestr(name, pickle.dumps({"x": Bytes()}, 2) if is_pickle else content)
        if method == "repeated":
            largest = max(archive.infolist(), key=lambda entry: entry.file_size)
            for number in range(9):
                archive.filelist.append(copy.copy(largest))
                archive.filelist[-1].filename += str(number)
            archive._didModify = True
    if method == "another archive":  # from which other readers of the format may read
        file.write_bytes(file.read_bytes() * 2)
    assert run_vil("evaluate", *TINY, f"MODEL.MODEL_PATH={file}").code == CHECKPOINT
    said = "its entries are compressed or overlap|a bytearray|begins with bytes"
    with pytest.raises(CheckpointError, match=said):
        read_weights(file)


# Class 7: model cards


def with_card(saved, folder, change):
    """The same weights with another model card."""
    card = read_metadata(saved)
    change(card)
    file = folder / "other.safetensors"
    write_weights(file, load_file(saved), card)
    return file


def setting(**values):
    return lambda card: card["model"].update(values)


HUGE = "l1,h1,d65536,n10000,s1,g1,p4,f3,a0"
CARDS = {
    "no model": lambda card: card.pop("model"),
    "a model that is a list": lambda card: card.update(model=[1]),
    "no architecture": lambda card: card["model"].pop("arch"),
    "an architecture that is a number": setting(arch=7),
    "an invalid architecture": setting(arch="l1,x9"),
    "a terabyte of weights": setting(arch=HUGE),
    "a billion blocks": setting(arch="l1,h1,d16,n1000000000,s1,g1,p4,f3,a0"),
    "a million classes": setting(num_classes=1_000_000),
    "half a class": setting(num_classes=2.5),
    "classes below zero": setting(num_classes=-1),
    "an image of a million pixels a side": setting(img_size=1_000_000),
    "an image of more positions than the file has": setting(img_size=2048),
    "a crop of a billionth": lambda card: card.update(transform={"crop_pct": 1e-7}),
    "a crop of nothing": lambda card: card.update(transform={"crop_pct": 0}),
    "a large image before the crop": lambda card: card.update(transform={"crop_pct": 5e-4}),
    "a deviation of zero": lambda card: card.update(transform={"std": [0, 0, 0]}),
    "three sides": setting(img_size=[32, 32, 32]),
    "an image size that is text": setting(img_size="32"),
    "a drop rate of two": setting(drop_rate=2),
    "an epsilon of NaN": setting(norm_eps=float("nan")),
    "arguments that are a list": setting(attention_args=[1]),
    "arguments that are numbers": setting(attention_args={"longformer": 3}),
    "class names that are numbers": lambda card: card.update(classes=[1, 2, 3, 4]),
    "a transform that is text": lambda card: card.update(transform="bicubic"),
    "a mean of text": lambda card: card.update(transform={"mean": ["x"]}),
    "a later version": lambda card: card.update(format=99),
}


@pytest.mark.trust(7)
@pytest.mark.parametrize("change", CARDS.values(), ids=CARDS)
def test_an_invalid_model_card_is_refused_before_anything_is_built(saved, tmp_path, change):
    file = with_card(saved, tmp_path, change)
    with pytest.raises(CheckpointError, match="other.safetensors"):
        vil.from_pretrained(file)
    ended = run_vil("evaluate", f"MODEL.MODEL_PATH={file}", "DATA.TEST=[fake]")
    assert ended.code == CHECKPOINT, ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.trust(7)
def test_a_saved_folder_with_an_invalid_card_is_refused(saved, tmp_path):
    vil.save_pretrained(vil.from_pretrained(saved), tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["vil"]["model"]["arch"] = HUGE
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="a model of at least .* but the file has"):
        vil.from_pretrained(tmp_path / "model")


# Class 7: what a config asks of the machine

ASKS = {
    "INPUT.IMAGE_SIZE=1000000": "IMAGE_SIZE: expected between 1 and 16384",
    "INPUT.CROP_PCT=1e-7": "resized to more than 4096 pixels",
    "DATALOADER.WORKERS=100000": "WORKERS: expected between -1 and 4096",
    "DATALOADER.BSZ=100000000": "DATALOADER.BSZ",
    f"MODEL.VIT.MSVIT.ARCH={HUGE}": "MODEL.VIT.MSVIT.ARCH: .* parameters, which take .* GB, more",
    "MODEL.VIT.MSVIT.ARCH=l1,h1,d16,n9999999999,s0,g1,p4,f3,a0": "at most 10000",
}


@pytest.mark.trust(7)
@pytest.mark.parametrize("word", ASKS)
def test_a_config_cannot_ask_for_more_than_there_is(tmp_path, word):
    ended = run_vil("train", *TINY, word, "--output_dir", tmp_path / "run")
    assert ended.code == 2, ended.err
    assert ended.err.count("\n") == 1
    assert re.search(ASKS[word], ended.err), ended.err


@pytest.mark.trust(7)
@pytest.mark.parametrize("name", ["predict", "embed"])
def test_an_image_larger_than_memory_is_refused(saved, tmp_path, name, monkeypatch):
    """A model whose parameters do not depend on the size of its images may declare any size."""
    monkeypatch.setattr("vil.workflows.inference.free_bytes", lambda device: 10**4)
    words = (*TINY, f"MODEL.MODEL_PATH={saved}")
    ended = run_vil(name, "--sample", *words, "--output-file", tmp_path / "x.npy")
    assert ended.code == 2, ended.err
    assert "INPUT.IMAGE_SIZE 32: one image takes" in ended.err


@pytest.mark.trust(7)
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't")])
def test_a_machine_without_memory_is_named(monkeypatch, error):
    def fail(*args):
        raise error

    monkeypatch.setattr("vil.cli.config.annotate", fail)
    ended = run_vil("config")
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert "the machine is out of memory" in ended.err


@pytest.mark.trust(7)
def test_a_batch_larger_than_memory_is_refused(tmp_path):
    words = ("DATALOADER.BSZ=100000", "INPUT.IMAGE_SIZE=8192", "DATA.KWARGS.n=200000")
    ended = run_vil("train", *TINY, *words, "--output_dir", tmp_path / "run")
    assert ended.code == 2
    assert "a batch takes" in ended.err


@pytest.mark.long
@pytest.mark.trust(7)
@pytest.mark.parametrize(("hard", "code"), [(256, 0), (64, 2)])
def test_the_limit_of_open_files_is_raised_or_named(tmp_path, hard, code):
    words = (*TINY, "DATALOADER.WORKERS=6", "OPTIM.EPOCHS=1", "--output_dir", tmp_path / "run")
    ended = subprocess.run(
        command("train", *words),
        env=environment(),
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (48, hard)),
    )
    assert ended.returncode == code, ended.stderr
    if code:
        assert "DATALOADER.WORKERS 6 may need" in ended.stderr
        assert "ulimit -Hn" in ended.stderr
