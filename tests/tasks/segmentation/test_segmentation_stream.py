"""The classes of an image in bounded memory equal those of the whole image."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.common.small_runs import succeeds, vil
from tests.common.small_tasks import words_of
from tests.common.streaming import make_image, make_model
from vil.errors import ConfigError
from vil.streaming import prepare
from vil.streaming.map_files import convert_map
from vil.tasks.base import ImageMeta
from vil.tasks.segmentation.models import build_model, strip_classifier
from vil.tasks.segmentation.stream import MAX_ROWS, StreamedSegmentation
from vil.utils.timing import peak_tensor_bytes

ARCHS = {
    2: "l1,h1,d8,n1,s1,g1,p4,f3,a0_l2,h2,d16,n2,s1,g1,p2,f2,a1",
    3: "l1,h1,d8,n1,s1,g1,p4,f3,a1_l2,h2,d8,n1,s1,g1,p2,f2,a0_l3,h2,d8,n1,s0,g0,p3,f5,a0",
    5: "l1,h1,d8,n1,s1,g1,p2,f4,a0_l2,h1,d8,n1,s1,g1,p2,f3,a0_l3,h2,d16,n1,s1,g1,p2,f3,a0"
    "_l4,h2,d8,n1,s1,g1,p2,f3,a0_l5,h2,d8,n1,s1,g0,p2,f3,a0",
}
SIZES = [(131, 47), (61, 250), (1, 7), (96, 96)]
CLASSES = 7
META = ImageMeta("a.png", (600, 400))
TIE = 1e-4  # between the two largest logits, for which rounding may decide
CPU = torch.device("cpu")


def make_streamed(num_stages: int, head: str = "mlp"):
    """Return (model, its StreamedSegmentation)."""
    body = strip_classifier(make_model(ARCHS[num_stages], dtype=torch.float32))
    model = build_model(head, body, CLASSES, channels=12).eval()
    torch.nn.init.normal_(model.head.classifier.weight)
    palette = np.arange(3 * CLASSES, dtype=np.uint8).reshape(-1, 3)
    return model, StreamedSegmentation(SimpleNamespace(palette=palette), model)


def stream(streamed: StreamedSegmentation, image: torch.Tensor, memory: int = 2**30):
    """Return (prediction, classes (H, W)) of an image."""
    run = prepare(streamed.network, image, outputs=streamed.outputs, pad=streamed.pad)
    size = tuple(image.shape[1:])
    streamed.plan(size, memory)
    maps = {"classes": np.zeros(size, streamed.own_maps["classes"])}
    result = run.execute(run.planner.with_strips(1))
    return streamed.predict(result, ImageMeta("a.png", size), maps), maps["classes"]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("num_stages", ARCHS)
def test_equals_the_whole_image(num_stages, size):
    model, streamed = make_streamed(num_stages)
    image = make_image(size, dtype=torch.float32)
    with torch.no_grad():
        logits = model(image[None])
    expected, (first, second) = logits.argmax(1)[0].numpy(), logits[0].topk(2, dim=0).values
    is_tie = (first - second < TIE).numpy()
    assert is_tie.mean() < 0.01
    for rows in (1, 2, 5, 64):
        streamed.plan = lambda *_, rows=rows: setattr(streamed, "rows", rows)
        prediction, found = stream(streamed, image)
        assert (found == expected)[~is_tie].all()
        assert prediction.counts.tolist() == np.bincount(found.ravel(), minlength=7).tolist()
        assert prediction.size == size


def test_the_memory_limit_bounds_the_bands():
    model, streamed = make_streamed(3)
    image, size = make_image((600, 400), dtype=torch.float32), (600, 400)
    run = prepare(streamed.network, image, outputs=streamed.outputs, pad=streamed.pad)
    result = run.execute(run.planner.with_strips(8))
    previous = 1000
    for memory in (2**30, 2**21, 2**19):
        text = streamed.plan(size, memory)
        assert f"bands of {4 * streamed.rows} rows" in text
        assert streamed.rows < previous
        previous = streamed.rows
        measured = peak_tensor_bytes(lambda: streamed.predict(result, META, {}), CPU)
        assert 0.4 * memory < measured <= memory or streamed.rows == MAX_ROWS
    with pytest.raises(ConfigError, match="too small for the head: the smallest possible limit"):
        streamed.plan(size, 1000)


def test_models_that_do_not_stream():
    with pytest.raises(ConfigError, match="only the head mlp"):
        make_streamed(2, head="fpn")


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_files_of_classes(dtype, tmp_path):
    tifffile, zarr = (pytest.importorskip(name) for name in ("tifffile", "zarr"))
    palette = np.random.default_rng(0).integers(256, size=(200, 3), dtype=np.uint8)
    classes = np.random.default_rng(0).integers(200, size=(300, 517)).astype(dtype)
    np.save(tmp_path / "classes.npy", classes)
    for name in ("a.png", "b.tif", "c.zarr", "d.npy"):
        convert_map(tmp_path / "classes.npy", tmp_path / name, palette)
    with Image.open(tmp_path / "a.png") as image:
        assert image.mode == ("P" if dtype == np.uint8 else "I;16")
        assert (np.asarray(image) == classes).all()
        if dtype == np.uint8:
            assert (np.asarray(image.convert("RGB")) == palette[classes]).all()
    with tifffile.TiffFile(tmp_path / "b.tif") as file:
        page = file.pages[0]
        assert page.is_tiled
        assert page.compression.name == "ADOBE_DEFLATE"
        assert page.photometric.name == ("PALETTE" if dtype == np.uint8 else "MINISBLACK")
        assert (page.asarray() == classes).all()
    assert (zarr.open(str(tmp_path / "c.zarr"), mode="r")[:] == classes).all()
    assert (np.load(tmp_path / "d.npy") == classes).all()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("segmentation") / "run"
    words = ["DATA.KWARGS.n=8", "DATALOADER.BSZ=4", "OPTIM.EPOCHS=1"]
    succeeds("train", *words_of("segmentation", folder), *words, "--output_dir", folder)
    return folder


@pytest.mark.long
def test_the_command_saves_the_classes(run, tmp_path):
    pixels = np.random.default_rng(0).integers(256, size=(211, 301, 3), dtype=np.uint8)
    photo = tmp_path / "photo.png"
    Image.fromarray(pixels).save(photo)
    words = ["predict", "--run", run, photo, "--format", "json"]
    whole = succeeds(*words, "--output", tmp_path / "drawn", "SEGMENTATION.TEST.OUTPUTS=[classes]")
    (expected,) = json.loads(whole)
    names = ("a.png", "b.tif", "c.npy")
    for name, scratch in zip(names, ([], ["--scratch", tmp_path / "scratch"], [])):
        flags = ["--stream", "--check", "--memory", "8MiB", f"--save=classes={tmp_path / name}"]
        (found,) = json.loads(succeeds(*words, *flags, *scratch))
        assert found["file"] == expected["file"]
        assert (found["height"], found["width"]) == (211, 301)
        for one, other in zip(found["classes"], expected["classes"]):
            assert one["class"] == other["class"]
            assert abs(one["pixels"] - other["pixels"]) <= 3
    classes = np.load(tmp_path / "c.npy")
    (drawn,) = (tmp_path / "drawn").iterdir()
    assert (classes != np.asarray(Image.open(drawn))).sum() <= 3  # ties
    assert (np.asarray(Image.open(tmp_path / "a.png")) == classes).all()
    assert (pytest.importorskip("tifffile").imread(tmp_path / "b.tif") == classes).all()
    planned = succeeds("predict", "--run", run, photo, "--stream", "--dry-run")
    assert "head in bands of" in planned.splitlines()[-1]


@pytest.mark.long
def test_settings_that_do_not_stream(run, tmp_path):
    photo = tmp_path / "photo.png"
    Image.new("RGB", (64, 64)).save(photo)
    wrong = {
        "TEST.SIZE and TILE to 0": ["SEGMENTATION.TEST.SIZE=32"],
        "to 0": ["--tile", "32"],
        "too small": ["--memory", "1KiB"],
        "expected a name that ends in .png": ["--save=classes=map.jpg"],
        "unknown output": ["--save=class=map.png"],
    }
    for message, words in wrong.items():
        ended = vil("predict", "--run", run, photo, "--stream", *words)
        assert ended.code == 2, (message, ended.err)
        assert message in ended.err.splitlines()[-1]
