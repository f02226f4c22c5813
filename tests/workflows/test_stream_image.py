"""Streaming one image through a trained model, from Python."""

import numpy as np
import pytest
from PIL import Image

import vil
from vil.errors import SaveError
from vil.workflows.stream_image import ImageStream, StreamSettings


@pytest.fixture
def photo(tmp_path):
    pixels = np.random.default_rng(0).integers(256, size=(160, 160, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def make_stream(photo, overrides=None, **settings):
    return ImageStream(
        vil.load_for_inference("vil_nano", overrides), photo, StreamSettings(**settings)
    )


@pytest.mark.long
def test_no_work_of_another_model_is_resumed(photo, tmp_path):
    settings = dict(scratch=tmp_path / "scratch", memory="64MiB")
    same = [make_stream(photo, **settings).fingerprint for _ in range(2)]
    assert same[0] == same[1]
    changes = [
        {"MODEL.VIT.MSVIT.SW_EXACT": 1},
        {"MODEL.VIT.MSVIT.MODE": -1},
        {"MODEL.VIT.MSVIT.LN_EPS": 1e-2},
        {"INPUT.MEAN": [0.5, 0.5, 0.5]},
    ]
    others = [make_stream(photo, change, **settings).fingerprint for change in changes]
    others.append(make_stream(photo, scratch=tmp_path, memory="64.001MiB").fingerprint)
    assert len({same[0], *others}) == 6


@pytest.mark.long
def test_a_map_that_cannot_be_converted_is_kept(photo, tmp_path):
    """A folder takes the place of the output while the image is streamed."""
    out = tmp_path / "map.npy"
    stream = make_stream(photo, save={"stages.1": out})

    def block(share, seconds):
        out.mkdir(exist_ok=True)

    with pytest.raises(SaveError, match="cannot be written") as error:
        stream.predict(block)
    kept = str(error.value).rpartition("The complete map is in ")[2]
    assert np.load(kept).shape == stream.prepared.shapes["stages.1"]
