"""A detector with a teacher: the distance of pyramids, what is learned, which teachers fit."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.common.detection.detectors import detector, pictures
from tests.common.small_runs import metrics
from tests.common.small_runs import vil as command
from tests.common.small_tasks import SMALL_TASKS
from vil.tasks import task_for
from vil.tasks.detection.data.batch import collate
from vil.tasks.detection.models.fpn import pyramid_distance
from vil.tasks.weight_files import find_weights
from vil.workflows.configure import make_config
from vil.workflows.train import train_config

DETECTOR = SMALL_TASKS["detection"]
RETINANET = ["DETECTION.MODEL=retinanet", "DETECTION.ANCHORS.SIZES=[24,48,96]"]
SIZES = ((64, 96), (131, 70))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("scenes")


@pytest.fixture(scope="module")
def teacher(root):
    return train(root / "teacher", "SEED=1")


def train(folder, *words, **options):
    cfg = make_config(None, [*DETECTOR, *words], output_dir=folder, data=folder.parent / "data")
    return train_config(cfg, **options)


def weights(run):
    return load_file(run.last_checkpoint / "model.safetensors")


def test_the_distance_is_one_minus_the_correlation_of_each_channel():
    mine, theirs = torch.randn(2, 1, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    rows = zip(mine[0].flatten(1).numpy(), theirs[0].flatten(1).numpy())
    expected = np.mean([1 - np.corrcoef(*row)[0, 1] for row in rows])
    levels = {4: mine, 8: mine[..., :3, :3], 64: mine}
    found = pyramid_distance(levels, {4: theirs, 8: 2 + 3 * mine[..., :3, :3], 16: theirs})
    assert found.item() == pytest.approx(expected, abs=1e-5)  # a scale and an offset cost nothing


def test_constant_maps_have_finite_gradients():
    mine = torch.zeros(1, 2, 3, 3, requires_grad=True)
    pyramid_distance({4: mine}, {4: torch.randn(1, 2, 3, 3)}).backward()
    assert mine.grad.isfinite().all()
    one = torch.ones(1, 2, 1, 1, requires_grad=True)
    pyramid_distance({4: one}, {4: torch.randn(1, 2, 1, 1)}).backward()
    assert not one.grad.any()


@pytest.mark.parametrize(
    ("kind", "strides"), [("faster_rcnn", [4, 8, 16]), ("retinanet", [8, 16, 32, 64])]
)
def test_a_pyramid_does_not_depend_on_the_other_images(kind, strides):
    model = detector(kind).eval()
    images = pictures(*SIZES)
    with torch.no_grad():
        together, alone = model.pyramid(images), [model.pyramid([x])[0] for x in images]
    for mine, theirs, (height, width) in zip(together, alone, SIZES):
        assert list(mine) == list(theirs) == strides  # without "pool"
        for stride in mine:
            assert torch.allclose(mine[stride], theirs[stride], atol=1e-5)
        finest = min(mine)
        assert mine[finest].shape[-2:] == (-(-height // finest), -(-width // finest))


@pytest.mark.parametrize("words", [[], RETINANET], ids=["mask_rcnn", "retinanet"])
def test_a_detector_learns_its_teacher(words, teacher, root):
    own = [f"DISTILL.TEACHER={teacher.run_dir}", "DISTILL.SHARE=1.0", *words]
    run = train(root / f"learns-{len(words)}", *own)
    lines = metrics(run.run_dir, "train")
    assert lines[-1]["teacher"] < 0.9 * lines[0]["teacher"]
    assert lines[0]["teacher"] == pytest.approx(lines[0]["loss"])


def test_its_own_network_teaches_nothing(teacher, root, caplog):
    words = [f"DISTILL.TEACHER={teacher.run_dir}", "DISTILL.SHARE=1.0", "DISTILL.IMAGE_SIZE=32"]
    cfg = make_config(None, [*DETECTOR, *words], data=root / "data")
    task = task_for(cfg, torch.device("cpu"))
    model = task.build_model().train()
    task.load_weights(model, find_weights(str(teacher.run_dir), ""))
    dataset = task.synthetic(2, root / "fake")
    batch = task.prepare(collate([(*dataset[i][:2], i) for i in range(2)], ()))
    assert task.loss(model, batch).value.abs() < 1e-4
    assert "no effect: DISTILL.IMAGE_SIZE" in caplog.text
    assert "the heads of the detector learn nothing" in caplog.text


@pytest.mark.long
def test_a_run_with_a_teacher_resumes(teacher, root):
    words = [f"DISTILL.TEACHER={teacher.run_dir}", "OPTIM.EMA=0.9"]
    whole = train(root / "whole", *words)
    train(root / "stopped", *words, max_steps=3)
    resumed = train(root / "stopped", *words, resume=True)
    assert all(torch.equal(x, weights(resumed)[name]) for name, x in weights(whole).items())
    assert weights(whole).keys() == weights(teacher).keys()  # nothing of the teacher


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["DISTILL.TEACHER=dinov2_small"], "cannot teach TASK detection: name the folder"),
        (["DISTILL.TEACHER={teacher}", "DISTILL.CACHE=kept"], "trains on other crops or sizes"),
        (
            ["DISTILL.TEACHER={teacher}", "DETECTION.FPN.CHANNELS=8"],
            "has 16 channels in its pyramid, but the network has 8: set DETECTION.FPN.CHANNELS",
        ),
        (
            ["DISTILL.TEACHER={teacher}", *RETINANET, "DETECTION.FPN.STAGES=[2]",
             "DETECTION.ANCHORS.SIZES=[48]", "MODEL.VIT.MSVIT.ARCH="
             "l1,h1,d16,n1,s1,g1,p32,f3,a0_l2,h2,d32,n1,s1,g1,p2,f3,a0"],
            "has a pyramid with the strides [4, 8], but the network has [64]",
        ),
    ],
    ids=["no detector", "cache", "channels", "strides"],
)  # fmt: skip
def test_teachers_that_a_detector_cannot_have(words, message, teacher, root, tmp_path):
    words = [word.format(teacher=teacher.run_dir) for word in words]
    ended = command("train", *DETECTOR, *words, "--output_dir", tmp_path / "run")
    assert message in ended.err
    assert ended.err.strip().count("\n") == 0


def test_a_teacher_without_positions_for_large_images_is_refused(root, tmp_path):
    arch = "l1,h1,d16,n1,s1,g1,p4,f3,a1_l2,h2,d32,n1,s1,g1,p2,f3,a1"
    cropped = ["MODEL.VIT.POS_RESIZE=crop", f"MODEL.VIT.MSVIT.ARCH={arch}"]
    teacher = train(root / "cropped", *cropped, max_steps=1)
    words = [f"DISTILL.TEACHER={teacher.run_dir}", "DETECTION.INPUT.MAX_SIZE=128"]
    ended = command("train", *DETECTOR, *words, "--output_dir", tmp_path / "run")
    assert "takes images of at most 96 pixels, but DETECTION.INPUT.MAX_SIZE is 128" in ended.err
