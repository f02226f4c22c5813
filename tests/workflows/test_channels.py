"""A model of gray images or of bands, from training to prediction."""

import numpy as np
import pytest
from PIL import Image

import vil as package
from tests.common.small_runs import FOLDER, SMALL, TINY, succeeds, vil
from vil.config import load_config
from vil.utils.errors import ConfigError
from vil.workflows.check_data import check_data
from vil.workflows.embed import embed

ONE = ("INPUT.MEAN=[0.5]", "INPUT.STD=[0.25]", "OPTIM.EPOCHS=1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["INPUT.CHANNELS=17"], "between 1 and 16"),
        (["INPUT.CHANNELS=1"], "one per channel"),
        (["INPUT.MEAN=[1, 2]"], "one per channel"),
        (["INPUT.STD=[0]"], "INPUT.STD"),
    ],
)
def test_wrong_channels_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, changes)


@pytest.mark.long
@pytest.mark.parametrize("channels", [1, 5])
def test_a_run_of_other_channels(channels, tmp_path):
    options = [*TINY, *ONE, f"INPUT.CHANNELS={channels}", "INPUT.MEAN=[" + "0.5," * channels + "]"]
    run = tmp_path / "run"
    result = package.train(None, options, output_dir=run)
    assert result.model.in_chans == channels
    assert package.evaluate(run)["fake"] == result.metrics["fake"]
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, channels), np.uint8)
    file = tmp_path / ("image.npy" if channels == 5 else "image.png")
    if channels == 5:
        np.save(file, pixels)
    else:
        Image.fromarray(pixels[..., 0]).save(file)
    given = pixels if channels == 5 else pixels[..., 0]
    first, second = package.predict(run, [given, file])
    assert not first.error
    assert first.classes == second.classes
    (viewed,) = package.predict([run], file, tta="crops+hflip")
    assert not viewed.error
    assert viewed.classes != first.classes
    assert np.isfinite(embed(run, [given, file])).all()
    succeeds("predict", "--run", run, file, "--output", tmp_path / "drawn")
    assert Image.open(tmp_path / "drawn/image.png").mode == "RGB"
    succeeds("visualize", "attention", file, "--run", run, "--out", tmp_path / "maps.png")
    weights = tmp_path / "weights.safetensors"
    words = ("convert", result.best_checkpoint / "model.safetensors", weights)
    succeeds(*words, "--config-file", run / "config.yaml")
    found = package.load_for_inference(weights).cfg.INPUT
    assert channels == found.CHANNELS
    other = vil("train", "--resume", "--output_dir", run, "INPUT.CHANNELS=3", "INPUT.MEAN=[0.5]")
    assert other.code == 4
    assert "INPUT.CHANNELS" in other.err


@pytest.mark.long
def test_a_folder_of_bands_trains_reports_and_exports(tmp_path):
    random = np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 4)):
        for name in ("a", "b"):
            (tmp_path / "bands" / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 65536, (36, 40, 4), np.uint16)
                np.save(tmp_path / "bands" / split / name / f"{number}.npy", pixels)
    words = [*SMALL, *FOLDER, *ONE, "INPUT.CHANNELS=4"]
    data, run = tmp_path / "bands", tmp_path / "run"
    found = check_data(None, words, data=data)
    assert found.is_usable
    assert found.splits["train"].images.mean.shape == (4,)
    found.draw(tmp_path / "sheet.png")
    common = ("--data", data, "--output_dir", run)
    succeeds("train", *common, *words)
    succeeds("train", "--dry-run", "--data", data, *words)
    succeeds("report", run, "--data", data)
    succeeds("export", "--run", run, "--out", tmp_path / "bands.pt2", "--format", "torch")
