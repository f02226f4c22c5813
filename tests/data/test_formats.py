"""Every format gives the same samples for all start methods of workers, and skips broken images."""

import multiprocessing

import numpy as np
import pytest
import torch
from PIL import Image

from tests.common.data_files import CLASSES, samples, write_folder, write_tar
from vil.data import DATASETS, EXTRAS, build_dataset, is_numbered
from vil.data.datasets.composed import ConcatImageDataset
from vil.data.loader import EvalLoader, TrainLoader
from vil.data.transforms import eval_transform, train_transform
from vil.utils.errors import DataError
from vil.utils.extras import is_installed

OF_CLASSES = [
    name
    for name in DATASETS
    if getattr(DATASETS.load(name), "target_type", "class") == "class"
    and name != "images"  # without labels: tests/tasks/distillation
    and (name not in EXTRAS or is_installed(EXTRAS[name].module))
]
OWN = {"fake": {"n": 12, "size": 8}, "digits": {"size": 8}, "hf": {"folder": "hf"}}


def concatenated(root, split, transform):
    """All datasets as one, as starting workers is what takes time."""
    sets = [build_dataset(name, root, split, transform, **OWN.get(name, {})) for name in OF_CLASSES]
    return ConcatImageDataset(sets, OF_CLASSES)


def read(root, context, workers):
    """Yield names, targets, pixels and reports of a training epoch and an evaluation."""
    options = {"context": context, "max_bad_fraction": 1.0}
    train, val = (
        concatenated(root, split, transform)
        for split, transform in (("train", train_transform(6)), ("val", eval_transform(6)))
    )
    loader = TrainLoader(train, batch_size=4, seed=5, workers=workers, **options)
    evaluation = EvalLoader(val, batch_size=50, workers=min(workers, 1), **options)
    for dataset, batches in (
        (train, loader.batches(0, loader.steps_per_epoch)),
        (val, evaluation),
    ):
        for batch in batches:
            names = [dataset.sample_name(index) for index in batch.indices.tolist()]
            yield names, batch.targets, batch.images, batch.bad_samples


@pytest.fixture(scope="module")
def reference(everything):
    """Without workers."""
    return list(read(everything, None, 0))


def test_the_reference_covers_every_dataset_and_every_broken_image(reference):
    names = {name.split("/")[0] for names, *_ in reference for name in names}
    assert names == set(OF_CLASSES)
    broken = {report.name for *_, bad_samples in reference for report in bad_samples}
    assert broken >= {
        "imagenet/train.zip@c9/bad0.png",
        "tar/val.tar@c9/bad0.png",
        "tsv/c9/bad0.png",
    }


@pytest.mark.defect("B22")
@pytest.mark.long
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_start_methods_agree_for_every_dataset(everything, reference, context):
    multiprocessing.set_forkserver_preload(["vil.data.loader"])  # import torch once for all workers
    batches = list(read(everything, context, 2))
    assert len(batches) == len(reference)
    for one, other in zip(batches, reference):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])
        assert torch.equal(one[2], other[2])
        assert one[3] == other[3]


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("name", OF_CLASSES)
def test_every_dataset_is_an_image_dataset(name, split, everything):
    own = {"folder": "hf"} if name == "hf" else {}
    dataset = build_dataset(name, everything, split, **own)
    image, target = dataset[5]
    assert isinstance(image, Image.Image)
    assert image.mode == "RGB"
    assert type(target) is int
    assert len(dataset.classes) == CLASSES
    assert all(type(name) is str for name in dataset.classes)
    assert (dataset.targets.dtype, dataset.targets.shape) == (np.int64, (len(dataset),))
    assert dataset.targets.min() >= 0
    assert dataset.targets.max() < CLASSES
    assert len({dataset.sample_name(i) for i in range(len(dataset))}) == len(dataset)
    transformed = build_dataset(name, everything, split, lambda image: image.size, **own)
    assert transformed[5] == (image.size, target)


@pytest.mark.parametrize("name", [name for name in DATASETS if is_numbered(name)])
def test_numbered_datasets_take_the_number_of_classes(name, everything):
    assert len(build_dataset(name, everything, "val", num_classes=15).classes) == 15
    with pytest.raises(DataError, match=r"line \d+: class [4-9] is out of range.*0\.\.3"):
        build_dataset(name, everything, "train", num_classes=4)


def test_a_folder_and_a_tar_of_the_same_images_are_the_same_dataset(tmp_path):
    """Including order and class numbers, so that a run can switch from one to the other."""
    for split in ("train", "val"):
        files = {name.replace("c1/", "c1-a/"): data for name, data in samples(split, 2).items()}
        write_folder(tmp_path, split, files)
        write_tar(tmp_path, split, files)
        folder, tar = (build_dataset(name, tmp_path, split) for name in ("folder", "tar"))
        assert tar.classes == folder.classes
        assert np.array_equal(tar.targets, folder.targets)
        names = [tar.sample_name(i).replace(".tar@", "/") for i in range(len(tar))]
        assert names == [folder.sample_name(i) for i in range(len(folder))]
        assert tar[3][0].tobytes() == folder[3][0].tobytes()
