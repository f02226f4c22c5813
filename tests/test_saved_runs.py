"""Runs and weight files that an earlier commit wrote resume, evaluate and predict as before.

The files lie in fixtures/saved_runs, with what that commit made of them in expected.json
(fixtures/make_saved_runs.py). Their configs have all keys that it had. Each check works on a copy.
"""

import json
from functools import partial

import pytest
from fixtures.saved_runs import CHECKS, EXPECTED, Commands

from tests.common.marks import cases
from tests.common.saved_runs import copy_run

# Another processor sums in another order: the logits differ by 1e-6, and the losses of resumed
# steps too. Lost first moments of AdamW would change these by 1e-3 from the second step on.
TOLERANCE = 3e-4
# The top1 of two of 360 images, and the average precision of boxes whose scores change places.
PIXELS = 0.05
PERCENT = {"top1": 0.6, "top5": 0.6, "box_ap": 0.1, "box_ap50": 0.1, "mask_ap": 0.1}


@pytest.fixture(scope="module")
def commands():
    started = Commands()
    yield started
    started.close()


def flat(found: object, path: str = "") -> dict[str, object]:
    """{path: leaf} of nested dicts and lists."""
    items = found.items() if isinstance(found, dict) else enumerate(found)
    leaves = {}
    for name, value in items:
        key = f"{path}/{name}"
        leaves |= flat(value, key) if isinstance(value, dict | list) else {key: value}
    return leaves


LONG = {"resume classifier", *(name for name in CHECKS if "detector" in name)}


@pytest.mark.parametrize("name", cases(CHECKS, LONG))
def test_as_the_earlier_commit_did(name, commands, tmp_path):
    copy = copy_run("", tmp_path / "saved")
    found = flat({"": CHECKS[name](partial(commands, copy), copy)})
    wanted = flat({"": json.loads(EXPECTED.read_text())[name]})
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        if isinstance(value, str):
            assert found[key] == value, key
        else:
            margin = PIXELS if "/box/" in key else PERCENT.get(key.rpartition("/")[2], 1e-4)
            assert found[key] == pytest.approx(value, rel=TOLERANCE, abs=margin), key
