"""Small scenes, written once: the folder that the set `scenes` finds."""

import pytest

from vil.data.synthetic.scenes import find_scenes

SMALL = {"seed": 3, "train": 8, "val": 4, "low": 56, "high": 83}


@pytest.fixture(scope="session")
def scenes_root(tmp_path_factory):
    """DATA.PATH, with the scenes of SMALL below it."""
    root = tmp_path_factory.mktemp("detection")
    find_scenes(root, **SMALL)
    return root


@pytest.fixture(scope="session")
def small():
    """The own arguments with which the set `scenes` finds them."""
    return SMALL
