"""Write small datasets in every format."""

import base64
import io
import json
import pickle
import struct
import tarfile
import zipfile

import numpy as np
from PIL import Image

from vil.utils.extras import is_installed

CLASSES = 10


def png_bytes(seed, size=(12, 9)):
    """PNG bytes of noise, different for each seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def samples(split, per_class=1, broken=0):
    """{member name: bytes} in CLASSES folders, with `broken` text files in the last one."""
    start = {"train": 0, "val": 1000}[split]
    files = {
        f"c{number}/{start + number * per_class + i}.png": png_bytes(start + number * per_class + i)
        for number in range(CLASSES)
        for i in range(per_class)
    }
    return files | {f"c{CLASSES - 1}/bad{i}.png": b"<html>404</html>" for i in range(broken)}


def write_folder(root, split, files):
    for name, content in files.items():
        path = root / split / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def write_zip(root, split, files, method=zipfile.ZIP_DEFLATED):
    """Write the zip in reverse order of the map, as the order of the zip counts."""
    with zipfile.ZipFile(root / f"{split}.zip", "w", method) as archive:
        for name in reversed(files):
            archive.writestr(name, files[name])
    write_map(root, split, {name: int(name[1 : name.index("/")]) for name in files})


def write_map(root, split, labels):
    lines = [f"{split}.zip@{name}\t{label}\n" for name, label in labels.items()]
    (root / f"{split}_map.txt").write_text("".join(lines))


def write_tar(root, split, files, prefix=""):
    with tarfile.open(root / f"{split}.tar", "w") as archive:
        for name in reversed(files):
            member = tarfile.TarInfo(prefix + name)
            member.size = len(files[name])
            archive.addfile(member, io.BytesIO(files[name]))


def write_tsv(root, split, files, *, as_json=False, name=None, lineidx=True):
    """Columns key, label, image; the label is the class number."""
    name, offsets = name or split, []
    with open(root / f"{name}.tsv", "wb") as file:
        for key, content in files.items():
            label = key[1 : key.index("/")]
            if as_json:
                label = json.dumps([{"class": label, "score": 1.0}, {"class": "0"}])
            offsets.append(file.tell())
            columns = [key.encode(), label.encode(), base64.b64encode(content)]
            file.write(b"\t".join(columns) + b"\n")
    if lineidx:
        (root / f"{name}.lineidx").write_text("".join(f"{offset}\n" for offset in offsets))
    (root / f"{name}.yaml").write_text(f"img: {name}.tsv\n")


def write_cifar(root, monkeypatch):
    """Write both in torchvision's pickle format, and patch torchvision's checksums."""
    from torchvision.datasets import CIFAR10, CIFAR100

    for source, key, names in (
        (CIFAR10, "labels", ("data_batch_1", "test_batch")),
        (CIFAR100, "fine_labels", ("train", "test")),
    ):
        folder = root / source.base_folder
        folder.mkdir()
        for seed, name in enumerate(names):
            data = np.random.default_rng(seed).integers(0, 256, (12, 3072)).astype(np.uint8)
            (folder / name).write_bytes(
                pickle.dumps({"data": data, key: [i % CLASSES for i in range(12)]})
            )
        meta = {**source.meta, "md5": None}
        classes = [f"class {number}" for number in range(CLASSES)]
        (folder / meta["filename"]).write_bytes(pickle.dumps({meta["key"]: classes}))
        monkeypatch.setattr(source, "train_list", [[names[0], None]])
        monkeypatch.setattr(source, "test_list", [[names[1], None]])
        monkeypatch.setattr(source, "meta", meta)


def write_mnist(root):
    """Write the four files: magic number, sizes, unsigned bytes."""
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for seed, name in enumerate(("train", "t10k")):
        pixels = np.random.default_rng(seed).integers(0, 256, (12, 28, 28)).astype(np.uint8)
        head = struct.pack(">IIII", 0x803, 12, 28, 28)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(head + pixels.tobytes())
        labels = bytes(i % CLASSES for i in range(12))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, 12) + labels)


def write_all_formats(root, monkeypatch):
    """Write ten classes for each of DATASETS below root, with one broken image per archive."""
    for split in ("train", "val"):
        files = samples(split)
        write_folder(root, split, files)
        for write in (write_zip, write_tar, write_tsv, write_shards):
            write(root, split, samples(split, broken=1))
    write_table(root)
    if is_installed("datasets"):
        write_hf(root, "hf")
    write_cifar(root, monkeypatch)
    write_mnist(root)
    return root


def write_table(root):
    """Write labels.csv, of the images of `write_folder`."""
    rows = [
        f"{split}/{n},{n.split('/')[0]},{split}"
        for split in ("train", "val")
        for n in samples(split)
    ]
    (root / "labels.csv").write_text("\n".join(["path,label,split", *rows]))


def write_shard(path, members):
    """Write a tar of {name: bytes or text}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            content = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def write_shards(root, split, files, count=2, name="{}-{:06}.tar"):
    """Write {split}-000000.tar, ... with the samples of `samples`, each with a .cls."""
    size = -(-len(files) // count)
    for shard in range(count):
        members = {}
        for key in list(files)[shard * size : (shard + 1) * size]:
            stem = key.replace("/", "-").removesuffix(".png")
            members |= {f"{stem}.png": files[key], f"{stem}.cls": key[1 : key.index("/")]}
        write_shard(root / name.format(split, shard), members)


def write_hf(root, name):
    """Write a folder of the library datasets, with the images of `samples`."""
    import datasets

    types = {"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=CLASSES)}
    parts = {}
    for split, name_of_split in (("train", "train"), ("val", "validation")):
        files = samples(split)
        cells = [{"bytes": data, "path": None} for data in files.values()]
        labels = [int(key[1 : key.index("/")]) for key in files]
        columns = {"image": cells, "label": labels}
        features = datasets.Features(types)
        parts[name_of_split] = datasets.Dataset.from_dict(columns, features=features)
    datasets.disable_progress_bars()
    datasets.DatasetDict(parts).save_to_disk(root / name)
