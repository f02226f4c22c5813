"""benchmarks/compare_editions.py finds what differs between two checkpoints."""

import importlib
import sys
from pathlib import Path

import torch

from tests.common.small_runs import TINY, checkpoint, succeeds

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts, not part of the package
editions = importlib.import_module("compare_editions")


def test_checkpoints_differ_by_what_was_trained(tmp_path):
    for name in ("one", "again"):
        succeeds("train", *TINY, "OPTIM.EPOCHS=1", "--output_dir", tmp_path / name)
    one, again = (
        editions.read_checkpoint(checkpoint(tmp_path / name)) for name in ("one", "again")
    )
    assert editions.differing_tensors(one, again) == []
    moments = [name for name in one if name.startswith("state.pt/")]
    assert moments
    again[moments[0]] = torch.full_like(again[moments[0]], torch.nan)
    del again[moments[1]]
    found = editions.differing_tensors(one, again)
    assert found == [f"{moments[1]} (only in one)", moments[0]]
