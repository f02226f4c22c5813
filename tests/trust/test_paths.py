"""A dataset description from somebody else never leads outside its root."""

import json
import os
import shutil
import tarfile

import pytest

from tests.common.data_files import samples, write_tsv
from vil.data import build_dataset
from vil.data.formats import archive
from vil.data.formats.archive import TarArchive, ZipArchive
from vil.utils.errors import DataError
from vil.utils.safe_files import path_below

pytestmark = pytest.mark.trust(6)
FILES = samples("train")
TSV_FILES = ("img", "label", "hw", "linelist", "labelmap")


@pytest.fixture
def sets(tmp_path):
    """`inside` is the root of a dataset, `outside` a folder beside it with the same files."""
    for name in ("inside", "outside"):
        (tmp_path / name).mkdir()
        write_tsv(tmp_path / name, "train", FILES)
        for part in ("hw", "label"):
            rows = (f"{key}\t{number}\n" for number, key in enumerate(FILES))
            (tmp_path / name / f"{part}.tsv").write_text("".join(rows))
        (tmp_path / name / "linelist").write_text("0\n1\n")
        names = "".join(f"class {number}\n" for number in range(len(FILES)))
        (tmp_path / name / "labelmap").write_text(names)
    return tmp_path / "inside", tmp_path / "outside"


def name_of(key):
    return {"img": "train.tsv", "hw": "hw.tsv", "label": "label.tsv"}.get(key, key)


@pytest.mark.parametrize("by", ["dots", "absolute", "link"])
@pytest.mark.parametrize("key", TSV_FILES)
def test_a_yaml_names_no_file_outside_of_its_root(sets, key, by):
    inside, outside = sets
    target = outside / name_of(key)
    if by == "link":
        (inside / "link").symlink_to(target)
    given = {"dots": f"../outside/{target.name}", "absolute": str(target), "link": "link"}[by]
    tree = {"img": "train.tsv", key: given}
    (inside / "train.yaml").write_text(json.dumps(tree))
    with pytest.raises(DataError, match="train.yaml names .* which is not below .*extra_roots"):
        build_dataset("tsv", inside, "train")
    for folders in ([str(outside)], str(outside)):
        assert build_dataset("tsv", inside, "train", extra_roots=folders).targets.size
    assert build_dataset("tsv", inside.parent, "train", yaml="inside/train.yaml").targets.size


def test_a_root_that_is_a_link_is_followed(sets, tmp_path):
    (tmp_path / "disk").symlink_to(sets[0])
    assert len(build_dataset("tsv", tmp_path / "disk", "train")) == len(FILES)


def test_an_index_elsewhere_is_not_read(sets):
    inside, outside = sets
    (inside / "train.lineidx").unlink()
    (inside / "train.lineidx").symlink_to(outside / "train.lineidx")
    with pytest.raises(
        DataError, match="a link to .*outside/train.lineidx, .* not below .*: copy the file"
    ):
        build_dataset("tsv", inside, "train")


def test_an_index_that_cannot_be_written_is_kept_in_memory(sets, caplog):
    inside, _ = sets
    (inside / "train.lineidx").unlink()
    (inside / "train.lineidx").mkdir()  # cannot be replaced by a file, even by root
    before = sorted(os.listdir(inside))
    assert len(build_dataset("tsv", inside, "train")) == len(FILES)
    assert "train.lineidx is missing and cannot be written" in caplog.text
    assert sorted(os.listdir(inside)) == before


@pytest.mark.parametrize("name", ["../map.json", "{outside}/map.json", "link.json"])
def test_a_class_mapping_is_below_the_data(sets, name):
    inside, outside = sets
    (outside / "map.json").write_text('{"0": "class 0 (x)"}')
    shutil.copy(outside / "map.json", inside.parent)
    (inside / "link.json").symlink_to(outside / "map.json")
    with pytest.raises(DataError, match="DATA.TARGETMAP names .* is not below .*: copy the file"):
        path_below(inside, name.format(outside=outside), "DATA.TARGETMAP")


# Archives


def tar_header(name, size, kind=tarfile.REGTYPE):
    """A header with any size, also one that tarfile does not write. Negative: base 256."""
    info = tarfile.TarInfo(name)
    info.type = kind
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    number = (size % (1 << 96)).to_bytes(12, "big")
    block[124:136] = bytes([0xFF if size < 0 else 0x80]) + number[1:]
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


TARS = {
    "a negative size": tar_header("a/1.jpg", -512),
    "a size that leads back": tar_header("a/1.jpg", 0) + tar_header("a/2.jpg", -1024),
    "a long name of a terabyte": tar_header("x", 1 << 40, tarfile.GNUTYPE_LONGNAME),
    "a long name of a negative size": tar_header("x", -5, tarfile.GNUTYPE_LONGNAME),
    "a pax header of a terabyte": tar_header("x", 1 << 40, tarfile.XHDTYPE),
    "a pax header of a negative size": tar_header("x", -512, tarfile.XHDTYPE),
    "a member longer than the file": tar_header("a/1.jpg", 1 << 50),
    "a thousand pax headers": 5000 * tar_header("x", 0, tarfile.XHDTYPE),
}


@pytest.mark.trust(7)
@pytest.mark.parametrize("content", TARS.values(), ids=TARS)
def test_a_tar_with_impossible_sizes_is_refused(tmp_path, content):
    (tmp_path / "train.tar").write_bytes(content + bytes(1024))
    with pytest.raises(DataError, match="train.tar"):
        build_dataset("tar", tmp_path, "train")


@pytest.mark.trust(7)
@pytest.mark.parametrize("kind", [TarArchive, ZipArchive])
def test_the_members_of_an_archive_are_limited(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(archive, "MAX_MEMBERS", 2)
    shutil.make_archive(tmp_path / "all", "zip" if kind is ZipArchive else "tar", __file__[:-13])
    with pytest.raises(DataError, match="has more than 2 members"):
        kind(next(tmp_path.glob("all.*")), lambda name, size: True)
