"""An annotation file from somebody else selects no image outside of its folder."""

import json
import os

import pytest

from tests.common.detection.coco_files import box, content, write
from vil.tasks.detection.data.coco_json import read_annotations
from vil.tasks.detection.data.datasets import CocoDataset, build_detection_set
from vil.utils.errors import DataError

pytestmark = pytest.mark.trust(6)
OWN = {"images": "train", "annotations": "train.json"}


@pytest.fixture
def root(tmp_path):
    """A root with a folder of images and a file of annotations, and a folder beside it."""
    root = tmp_path / "inside"
    root.mkdir()
    folder, file = write(root, [box(1)])
    folder.rename(root / "train")
    file.rename(root / "train.json")
    (tmp_path / "outside").mkdir()
    return root


def build(root, **own):
    return build_detection_set("coco", root, "train", masks=False, **OWN, **own)


def link_to(root, target):
    """Replace an image by a link to the same image in another folder."""
    target.parent.mkdir(exist_ok=True)
    (root / "train/a.png").rename(target)
    (root / "train/a.png").symlink_to(target)


def test_a_link_is_followed_below_the_root_and_below_extra_roots(root):
    outside = root.parent / "outside"
    link_to(root, outside / "b.png")
    for own in ({}, {"extra_roots": str(root.parent / "pool")}):
        with pytest.raises(DataError, match="a.png, a link to .*b.png, which is not below"):
            build(root, **own)
    for extra in ([str(outside)], str(outside)):
        assert build(root, extra_roots=extra)[0]
    (root / "train/a.png").unlink()
    (outside / "b.png").rename(root / "train/a.png")
    link_to(root, root / "shared/b.png")
    assert build(root)[0]


def test_a_folder_that_is_a_link_is_followed(root):
    (root / "train").rename(root.parent / "disk")
    (root / "train").symlink_to(root.parent / "disk")
    assert build(root)[0]


def test_an_image_in_a_linked_folder_elsewhere_is_refused(root):
    (root / "train").rename(root.parent / "outside/train")
    (root / "train").mkdir()
    (root / "train/link").symlink_to(root.parent / "outside/train")
    images = [("link/a.png", 40, 30)]
    (root / "train.json").write_text(json.dumps(content([box(1)], images)))
    with pytest.raises(DataError, match="which is not below"):
        build(root)


def test_a_named_pipe_is_not_opened(root):
    os.mkfifo(root / "pipe.json")
    with pytest.raises(DataError, match="pipe.json cannot be read: not a regular file"):
        read_annotations(root / "pipe.json")
    with pytest.raises(DataError, match="not a regular file"):
        CocoDataset(root / "train", "/dev/zero", "train")
