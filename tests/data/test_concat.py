"""Several datasets as one, and datasets labelled unlike the model."""

import json

import pytest
import torch

from vil.data import build_dataset
from vil.data.class_mapping import read_class_mapping
from vil.data.datasets.concat import ConcatImageDataset
from vil.utils.errors import DataError


def fake(n, classes=3, transform=None):
    return build_dataset("fake", "", "train", transform, n=n, size=4, num_classes=classes)


def test_joined_sets_keep_their_samples_transforms_and_names():
    sets = [fake(1), fake(5, transform=lambda image: "seen"), fake(2)]
    joined = ConcatImageDataset(sets, ["a", "b", "c"])
    assert len(joined) == 8
    expected = [(name, ds, i) for name, ds in zip("abc", sets) for i in range(len(ds))]
    for index, (name, dataset, own) in enumerate(expected):
        assert joined[index] == dataset[own]
        assert joined.image(index) == dataset.image(own)
        assert joined.sample_name(index) == f"{name}/{dataset.sample_name(own)}"
        assert joined.targets[index] == dataset.targets[own]
    assert joined.classes == sets[0].classes


def test_other_numbers_of_classes_are_refused_and_other_names_told(caplog):
    with pytest.raises(DataError, match="joined: a 3, b 3, c 4"):
        ConcatImageDataset([fake(2), fake(2), fake(2, 4)], ["a", "b", "c"])
    ConcatImageDataset([fake(2), fake(3)], ["a", "b"])
    assert not caplog.text
    digits = build_dataset("digits", "", "train", num_classes=3)
    ConcatImageDataset([fake(2), digits, fake(2), digits], ["a", "b", "c", "d"])
    assert caplog.text.count("the classes of b, d are not called as those of a") == 1


NAMES = ["cat", "cat(house)", "cat (wild)", "dog(1)", "dogfish", "emu"]


def links(tmp_path, table, num_classes=4):
    (tmp_path / "map.json").write_text(table if isinstance(table, str) else json.dumps(table))
    return read_class_mapping(tmp_path / "map.json", num_classes, NAMES)


def test_a_target_map_links_by_the_name_before_the_last_bracket(tmp_path, caplog):
    """Equal, or followed by a bracket; several to one and one to several."""
    table = {"0": "cat(n1)", "3": "dog(1)(n2)", "1": "dog(x)", "2": "cat (n3)"}
    assert torch.equal(
        links(tmp_path, table),
        torch.tensor(
            [
                [True, True, False, False, False, False],
                [False, False, False, True, False, False],
                [False, False, True, False, False, False],
                [False, False, False, True, False, False],
            ]
        ),
    )
    assert "no class of the model stands for 2 of 6 classes" in caplog.text
    assert "the first: dogfish" in caplog.text
    assert links(tmp_path, {"2": "emu"})[2].tolist() == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        (["cat"], "must be a JSON object"),
        ({"4": "cat"}, r"'4': 'cat' must be a class of the model \(0\.\.3\)"),
        ({"-1": "cat"}, "'-1'"),
        ({"one": "cat"}, "'one'"),
        ({"0": 5}, "'0': 5"),
        ({"0": "yak(1)"}, "links no class of the model to one of cat, "),
    ],
)
def test_a_target_map_that_is_none_is_refused(tmp_path, table, message):
    with pytest.raises(DataError, match=message):
        links(tmp_path, table)
    with pytest.raises(DataError, match="there is no target map"):
        read_class_mapping(tmp_path / "gone.json", 4, NAMES)
