"""Concatenated datasets, and datasets with other classes than the model."""

import json

import pytest
import torch

from vil.data import build_dataset
from vil.data.classes import read_class_mapping
from vil.data.datasets.composed import ConcatImageDataset
from vil.utils.errors import DataError

pytestmark = pytest.mark.smoke


def fake(n, classes=3, transform=None):
    return build_dataset("fake", "", "train", transform, n=n, size=4, num_classes=classes)


def test_concatenated_datasets_keep_their_samples_transforms_and_names():
    sets = [fake(1), fake(5, transform=lambda image: "seen"), fake(2)]
    concat = ConcatImageDataset(sets, ["a", "b", "c"])
    assert len(concat) == 8
    expected = [(name, ds, i) for name, ds in zip("abc", sets) for i in range(len(ds))]
    for index, (name, dataset, local) in enumerate(expected):
        assert concat[index] == dataset[local]
        assert concat.image(index) == dataset.image(local)
        assert concat.sample_name(index) == f"{name}/{dataset.sample_name(local)}"
        assert concat.targets[index] == dataset.targets[local]
    assert concat.classes == sets[0].classes


def test_different_numbers_of_classes_are_rejected():
    with pytest.raises(DataError, match="concatenated: a 3, b 3, c 4"):
        ConcatImageDataset([fake(2), fake(2), fake(2, 4)], ["a", "b", "c"])


NAMES = ["cat", "cat(house)", "cat (wild)", "dog(1)", "dogfish", "emu"]


def mapping(tmp_path, table, num_classes=4):
    (tmp_path / "map.json").write_text(table if isinstance(table, str) else json.dumps(table))
    return read_class_mapping(tmp_path / "map.json", num_classes, NAMES)


def test_a_class_mapping_compares_the_name_before_the_last_parenthesis(tmp_path, caplog):
    """Equal names, or followed by a parenthesis; many to one and one to many."""
    table = {"0": "cat(n1)", "3": "dog(1)(n2)", "1": "dog(x)", "2": "cat (n3)"}
    assert torch.equal(
        mapping(tmp_path, table),
        torch.tensor(
            [
                [True, True, False, False, False, False],
                [False, False, False, True, False, False],
                [False, False, True, False, False, False],
                [False, False, False, True, False, False],
            ]
        ),
    )
    assert "no class of the model maps to 2 of 6 classes" in caplog.text
    assert "the first: dogfish" in caplog.text
    assert mapping(tmp_path, {"2": "emu"})[2].tolist() == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        (["cat"], "must contain a JSON object"),
        (
            {"4": "cat"},
            r"must map a class number of the model \(0\.\.3\) to a text, but '4' maps to 'cat'",
        ),
        ({"-1": "cat"}, "'-1'"),
        ({"one": "cat"}, "'one'"),
        ({"0": 5}, "'0' maps to 5"),
        ({"0": "yak(1)"}, "names a class of the dataset: use its class names, such as cat, "),
    ],
)
def test_an_invalid_class_mapping_is_rejected(tmp_path, table, message):
    with pytest.raises(DataError, match=message):
        mapping(tmp_path, table)
    with pytest.raises(DataError, match="there is no class mapping"):
        read_class_mapping(tmp_path / "gone.json", 4, NAMES)
