"""A streamed pass that ends anywhere is resumed from its journal, with the same bytes."""

import numpy as np
import pytest
import torch

from tests.common.streaming import all_outputs, make_image, make_model
from vil.streaming import journal, prepare

LOCAL = "l1,h1,d4,n1,s1,g1,p4,f3,a1_l2,h2,d8,n3,s1,g1,p2,f2,a0_l3,h2,d8,n2,s1,g0,p2,f2,a0"
TOKEN = "l1,h1,d4,n2,s1,g1,p4,f3,a1_l2,h2,d8,n2,s1,g1,p2,f2,a0"
FULL = "l1,h1,d4,n1,s1,g1,p4,f3,a1_l2,h2,d8,n2,s0,g1,p2,f2,a0"


class Stopped(Exception):
    """As if the process had ended."""


def run(model, image, folder, stop_at: int | None = None):
    """Stream with a journal and maps in a folder. Returns ({output: array}, reported shares)."""
    shares = []

    def progress(share: float) -> None:
        assert 0 <= share <= 1 + 1e-9
        shares.append(share)
        if len(shares) == stop_at:
            raise Stopped

    names = [name for name in all_outputs(model) if name.startswith("stages")]
    run = prepare(model, image, outputs=all_outputs(model))
    plan = run.planner.with_strips(1, on_disk=True)
    run.into = {
        name: np.memmap(folder / name, np.float64, "r+" if (folder / name).exists() else "w+",
                        shape=run.shapes[name])
        for name in names
    }  # fmt: skip
    record = journal.FileJournal(folder / "journal.pt", "this run")
    result = run.execute(plan, folder=folder, journal=record, progress=progress)
    return {n: np.array(result[n]) for n in all_outputs(model)}, shares


@pytest.mark.long
@pytest.mark.parametrize(("arch", "mask"), [(LOCAL, -1), (FULL, 1), (LOCAL, 1), (TOKEN, 1)])
def test_the_same_bytes_after_every_strip(arch, mask, tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "SAVE_SECONDS", 0)
    model, image = make_model(arch, sw_exact=mask), make_image((120, 45))
    (tmp_path / "whole").mkdir()
    expected, shares = run(model, image, tmp_path / "whole")
    assert len(shares) > 10
    assert shares == sorted(shares)
    for stop_at in range(1, len(shares), 3):
        folder = tmp_path / str(stop_at)
        folder.mkdir()
        with pytest.raises(Stopped):
            run(model, image, folder, stop_at)
        found, rest = run(model, image, folder)
        assert rest == sorted(rest)
        for name, value in expected.items():
            assert np.array_equal(found[name], value), (stop_at, name)


def test_the_record_of_another_run_and_a_broken_one_are_ignored(tmp_path):
    file = tmp_path / "journal.pt"
    journal.FileJournal(file, "one").complete(0, {"strip": None, "x_global": torch.zeros(1)})
    assert journal.FileJournal(file, "one").is_resumed
    assert not journal.FileJournal(file, "two").is_resumed
    file.write_bytes(file.read_bytes()[:100])
    assert not journal.FileJournal(file, "one").is_resumed
    torch.save([1], file)
    assert not journal.FileJournal(file, "one").is_resumed
