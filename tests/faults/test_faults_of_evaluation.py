"""Evaluation is the same for any number of ranks: every image counts exactly once."""

import json
from pathlib import Path

import pytest

from tests.common.small_runs import FAKE, SMALL, draw_pictures, metrics, torchrun, vil

IMAGES = 37  # divides by neither 2 nor 3
COUNTS, SIZES = (IMAGES, 2, 1), (12, 1)  # images, and of a batch over all ranks
TINY = (
    *SMALL, *FAKE, "DATA.NUM_CLASSES=2", f"DATA.KWARGS={{n: {IMAGES}, size: 32, num_classes: 2}}",
    "DATALOADER.BSZ=12", "OPTIM.EPOCHS=1", "AMP.TF32=False", "OUTPUT_PERCLASS_ACC=True",
)  # fmt: skip
STRATEGIES = ("ddp", "fsdp")


def training(root, world, strategy):
    """Return a command that evaluates on a set that does not divide evenly, and on two images."""
    words = ("DATA.TEST=[fake, folder]", f"DATA.PATH={root}/pictures", "DATA.CLASSES=by_position")
    folder = root / f"{strategy} {world}"
    return ["train", *TINY, *words, f"DISTRIBUTED.STRATEGY={strategy}", "--output_dir", folder]


def evaluation(root, world, count, size):
    where = root / f"{world} {count} {size}"
    words = (f"DATA.KWARGS.n={count}", f"DATALOADER.BSZ={size}", "--output_dir", where)
    return ["evaluate", "--run", root / "run", "--checkpoint", "last", *words]


def found(folder) -> dict:
    return json.loads(Path(folder, "eval/results.json").read_text())


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Folders: run, 1 <images> <size> of one process; <world> ..., ddp <world>, ... of more."""
    root = tmp_path_factory.mktemp("evaluation")
    draw_pictures(root / "pictures/val", {"a": 1, "b": 1})
    alone = [["train", *TINY, "--output_dir", root / "run"]]
    alone += [evaluation(root, 1, count, size) for count in COUNTS for size in SIZES]
    for line in alone:
        ended = vil(*line)
        assert ended.code == 0, ended.err
    for world in (2, 3):
        lines = [evaluation(root, world, count, size) for count in COUNTS for size in SIZES]
        torchrun(world, *lines, *(training(root, world, name) for name in STRATEGIES))
    return root


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("world", [2, 3])
def test_as_many_images_as_there_are(root, world, count, size):
    ours, theirs = (found(root / f"{n} {count} {size}")["fake"] for n in (world, 1))
    loss, wanted = ours.pop("loss"), theirs.pop("loss")
    assert ours == theirs
    assert count == ours["count"] == sum(ours["per_class"]["count"])
    # float32 may round otherwise in batches of another size
    assert loss == pytest.approx(wanted, rel=0 if size == 1 else 1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [2, 3])
def test_during_training(root, world, strategy):
    """Also with sharded weights (FSDP2), where a rank without images must still participate."""
    run = root / f"{strategy} {world}"
    logged = {m["split"]: m for m in metrics(run, "val")}
    assert vil("evaluate", "--run", run, "--checkpoint", "last").code == 0
    for split, figures in found(run).items():
        line = logged[f"val/{split}"]
        assert all(line[n] == figures[n] for n in ("top1", "macro_f1", "count"))
        assert line["loss"] == pytest.approx(figures["loss"], rel=1e-6)
    assert found(run)["folder"]["count"] == 2
