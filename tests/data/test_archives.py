"""Zip and tar: random access from any process and thread, members left out, rejected files."""

import io
import logging
import multiprocessing
import os
import pickle
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.common.data_files import png_bytes, samples, write_map, write_tar, write_zip
from vil.data import build_dataset
from vil.data.formats.archive import TarArchive, ZipArchive
from vil.data.image import UnreadableImage
from vil.utils.errors import DataError

pytestmark = pytest.mark.smoke

BLOBS = {f"{i}.bin": bytes([i]) * i * 97 + os.urandom(500) for i in range(60)}


def every(name, size):
    return True


def make(kind, folder, files=None):
    """An archive of the given kind with these files, and its reader."""
    files = BLOBS if files is None else files
    path = folder / f"a.{kind}"
    if kind == "tar":
        write_tar(folder, "a", files)
        return path, TarArchive(path, every)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if kind == "zip" else 0) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path, ZipArchive(path, every)


KINDS = ["zip", "stored.zip", "tar"]


def content(archive, index):
    return archive.names[index].decode(), archive.read(index)


@pytest.mark.parametrize("kind", KINDS)
def test_any_process_and_thread_reads_correct_bytes(kind, tmp_path):
    """The file is open before the fork: a shared file position would mix up the members."""
    _, archive = make(kind, tmp_path)
    assert content(archive, 5)[1] == BLOBS[content(archive, 5)[0]]
    indices = list(range(len(BLOBS))) * 5

    def check(start):
        names = [content(archive, i) for i in indices[start:] + indices[:start]]
        return all(BLOBS[name] == data for name, data in names) and len(names) == 300

    queue = multiprocessing.get_context("fork").SimpleQueue()
    children = [
        multiprocessing.get_context("fork").Process(target=lambda i=i: queue.put(check(i)))
        for i in range(3)
    ]
    for child in children:
        child.start()
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(check, range(8)))
    assert all(queue.get() for _ in children)
    for child in children:
        child.join()
    unpickled = pickle.loads(pickle.dumps(archive))  # as for spawned workers
    assert [content(unpickled, i) for i in range(60)] == [content(archive, i) for i in range(60)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_of_equal_names_is_used(kind, tmp_path, caplog):
    path, _ = make(kind, tmp_path, {"a.png": b"old", "b.png": b"other"})
    if kind == "tar":
        with tarfile.open(path, "a") as archive:
            member = tarfile.TarInfo("a.png")
            member.size = 3
            archive.addfile(member, io.BytesIO(b"new"))
    else:
        with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a.png", b"new")
    archive = (TarArchive if kind == "tar" else ZipArchive)(path, every)
    assert [content(archive, i) for i in range(2)] == [("b.png", b"other"), ("a.png", b"new")]
    assert "1 member was not used, because a later member" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_links_and_unsafe_names_are_left_out(kind, tmp_path, caplog):
    files = {"../up.png": b"1", "/etc/root.png": b"2", "ok.png": b"3", "a/../../b.png": b"4"}
    path, archive = make(kind, tmp_path, files)
    assert [content(archive, i) for i in range(len(archive))] == [("ok.png", b"3")]
    assert "3 members were left out because they are links" in caplog.text
    caplog.clear()
    if kind == "tar":
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "ok.png"
        with tarfile.open(path, "a") as more:
            more.addfile(link)
    else:
        link = zipfile.ZipInfo("link.png")
        link.external_attr = 0o120777 << 16
        with zipfile.ZipFile(path, "a") as more:
            more.writestr(link, "ok.png")
    assert len(type(archive)(path, every)) == 1
    assert "4 members were left out because they are links" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_an_invalid_or_truncated_file_is_one_error(kind, tmp_path):
    path, archive = make(kind, tmp_path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=f"{path} is not .*or is truncated"):
        type(archive)(path, every)
    with pytest.raises(UnreadableImage, match=r"ends \d+ bytes too early"):
        [archive.read(index) for index in range(len(archive))]
    path.write_bytes(b"neither" * 400)
    with pytest.raises(DataError, match=f"{path} is not "):
        type(archive)(path, every)


def test_a_compressed_tar_and_a_corrupt_header_are_rejected(tmp_path):
    path, _ = make("tar", tmp_path)
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as archive:
        second = archive.getmembers()[30].offset
    data[second + 100] ^= 255  # tarfile itself would stop here and lose half of the data
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"corrupt: no header at byte {second}"):
        TarArchive(path, every)
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a"))
    with pytest.raises(DataError, match="decompress it first"):
        TarArchive(path, every)


def test_encrypted_and_unsupported_members_of_a_zip_are_named(tmp_path):
    path, _ = make("zip", tmp_path, {"a.png": b"1" * 99})
    encrypted = bytearray(path.read_bytes())
    encrypted[encrypted.index(b"PK\1\2") + 8] |= 1
    path.write_bytes(encrypted)
    with pytest.raises(DataError, match=r"a\.png is encrypted"):
        ZipArchive(path, every)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("b.png", b"1" * 99)
    with pytest.raises(DataError, match=r"b\.png is encrypted or compressed by method 12"):
        ZipArchive(path, every)
    assert len(ZipArchive(path, lambda name, size: False)) == 0  # not wanted


@pytest.mark.parametrize("kind", ["zip", "stored.zip"])
def test_a_flipped_bit_in_a_zip_is_detected(kind, tmp_path):
    path, archive = make(kind, tmp_path, {"a.bin": bytes(range(256)) * 2})
    good = path.read_bytes()
    begin, packed = 30 + len("a.bin"), int(archive.fields["packed"][0])
    for place in (0, begin, begin + packed // 2):
        path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        with pytest.raises(UnreadableImage):
            type(archive)(path, every).read(0)


def test_a_deflated_member_is_limited_to_its_stated_size(tmp_path):
    path, archive = make("zip", tmp_path, {"a.bin": b"0" * 10_000_000})
    archive.fields["size"] = 100
    with pytest.raises(UnreadableImage, match="checksum"):
        archive.read(0)
    archive.fields["size"] = 1 << 40
    with pytest.raises(UnreadableImage, match="too many for an image"):
        archive.read(0)


def names(dataset):
    return [dataset.sample_name(i) for i in range(len(dataset))]


def test_the_zip_sets_the_order_and_the_map_the_classes(tmp_path):
    """Accepted forms of map lines; members that are not images: hidden, empty, other extensions."""
    files = {"b/2.JPG": png_bytes(2), "a/1.png": png_bytes(1), "3.webp": b"x", ".4.png": b"x"}
    write_zip(tmp_path, "train", {"c0/x": b""} | {f"c0/{n}": d for n, d in files.items()})
    with zipfile.ZipFile(tmp_path / "train.zip", "w") as archive:
        for name, content in (files | {"empty.png": b"", "unnamed.png": b"x"}).items():
            archive.writestr(name, content)
    (tmp_path / "train_map.txt").write_bytes(
        b"train.zip@/a/1.png\t\t4\textra\r\n\n  \nany.zip@b/2.JPG\t0\nz@b/2.JPG\t0\n"
        b"z@3.webp\t1\nz@.4.png\t1\nz@empty.png\t1\nz@thing@b/2.JPG\t9\n"
    )
    dataset = build_dataset("imagenet", tmp_path, "train")
    assert names(dataset) == ["train.zip@b/2.JPG", "train.zip@a/1.png"]
    assert dataset.targets.tolist() == [0, 4]
    assert dataset.classes == [str(i) for i in range(10)]  # those of the map, also without images


def test_some_members_of_a_map_may_be_missing_but_not_all(tmp_path, caplog):
    write_zip(tmp_path, "val", samples("val"))
    write_map(tmp_path, "val", {"c3/1003.png": 3, "gone/1.png": 1, "gone/2.png": 2})
    dataset = build_dataset("imagenet", tmp_path, "val")
    assert names(dataset) == ["val.zip@c3/1003.png"]
    assert "names 2 images that are not in" in caplog.text
    assert caplog.text.count("gone/1.png") == 1
    write_map(tmp_path, "val", {"gone/1.png": 1})
    with pytest.raises(DataError, match=r"val_map\.txt names no image of .*val\.zip"):
        build_dataset("imagenet", tmp_path, "val")
    with pytest.raises(DataError, match=r"end in one of .*\.png \.npy"):
        build_dataset("imagenet", tmp_path, "val", channels=5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("c0/0.png\t0", r"line 2: expected '<zip>@<member><TAB><class>', got 'c0/0\.png"),
        ("train.zip@c0/0.png 0", "line 2: expected"),
        ("train.zip@c0/0.png\tcat", "line 2: the class must be an integer, not 'cat'"),
        ("train.zip@c0/0.png\t-1", r"line 2: class -1 is out of range.*from 0 up"),
        ("train.zip@c1/1.png\t2", r"line 2: c1/1\.png is class 2, but was class 1 before"),
    ],
)
def test_an_invalid_line_is_named(line, message, tmp_path):
    write_zip(tmp_path, "train", samples("train"))
    (tmp_path / "train_map.txt").write_text(f"train.zip@c1/1.png\t1\n{line}\n")
    with pytest.raises(DataError, match=rf"train_map\.txt, {message}"):
        build_dataset("imagenet", tmp_path, "train")


def test_validation_has_the_classes_of_the_training_map(tmp_path):
    write_zip(tmp_path, "train", samples("train"))
    write_zip(tmp_path, "val", {"c2/1.png": png_bytes(1)})
    assert len(build_dataset("imagenet", tmp_path, "val").classes) == 10
    write_map(tmp_path, "val", {"c2/1.png": 10})
    with pytest.raises(DataError, match=r"val_map\.txt, line 1: class 10 is out of range.*0\.\.9"):
        build_dataset("imagenet", tmp_path, "val")
    (tmp_path / "train_map.txt").unlink()
    assert len(build_dataset("imagenet", tmp_path, "val").classes) == 11


def test_imagenet_may_be_folders_and_errors_show_both_layouts(tmp_path):
    with pytest.raises(DataError, match=r"(?s)├── train.*├── train\.zip.*└── val_map\.txt"):
        build_dataset("imagenet", tmp_path, "train")
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "train" / "cat" / "1.png").write_bytes(png_bytes(1))
    (tmp_path / "train_map.txt").write_text("left behind")
    assert build_dataset("imagenet", tmp_path, "train", num_classes=1).classes == ["cat"]
    with pytest.raises(ValueError, match="num_classes is 7.*has 1 folders"):
        build_dataset("imagenet", tmp_path, "train", num_classes=7)


def test_a_tar_may_have_a_folder_around_its_classes(tmp_path):
    for prefix in ("", "./", "train/", "./data/"):
        write_tar(tmp_path, "train", samples("train"), prefix)
        dataset = build_dataset("tar", tmp_path, "train")
        assert dataset.classes == [f"c{i}" for i in range(10)]
        assert dataset.targets.tolist() == list(range(10))
        assert dataset.sample_name(3).endswith("c3/3.png")
        assert dataset[3][0].size == (12, 9)


def test_a_tar_follows_the_rules_of_a_folder(tmp_path, caplog):
    with pytest.raises(DataError, match=r"(?s)there is no .*train\.tar.*├── train\.tar"):
        build_dataset("tar", tmp_path, "train")
    write_tar(tmp_path, "val", {"dog/1.png": png_bytes(1), "dog/._1.png": b"x", "dog/a.txt": b"x"})
    with caplog.at_level(logging.WARNING):
        assert build_dataset("tar", tmp_path, "val").classes == ["dog"]
    assert "classes are taken from the val split" in caplog.text
    write_tar(tmp_path, "train", {"cat/1.png": png_bytes(1), "dog/1.png": png_bytes(2)})
    assert build_dataset("tar", tmp_path, "val").targets.tolist() == [1]
    write_tar(tmp_path, "val", {"emu/1.png": png_bytes(1)})
    with pytest.raises(
        DataError, match=r"val\.tar has classes that are missing from the training split: emu"
    ):
        build_dataset("tar", tmp_path, "val")
    write_tar(tmp_path, "val", {"dog/1.png": png_bytes(1), "2.png": png_bytes(1)})
    with pytest.raises(DataError, match=r"val\.tar@2\.png is not <class>/<image>"):
        build_dataset("tar", tmp_path, "val")
    write_tar(tmp_path, "val", {"dog/1.txt": b"x"})
    with pytest.raises(DataError, match="has no images"):
        build_dataset("tar", tmp_path, "val")
