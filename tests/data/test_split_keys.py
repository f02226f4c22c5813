"""DATA.VAL_FRACTION, TEST_FRACTION, FOLDS and VAL: who trains on what, and what is refused."""

import pytest

from tests.common.built import task_of
from tests.common.data_files import png_bytes
from vil.config import get_config
from vil.engine.distributed import DistInfo
from vil.tasks import with_num_classes
from vil.utils.errors import ConfigError, DataError
from vil.workflows.check_data import check_data

pytestmark = pytest.mark.smoke

SMALL = ("DATA.TRAIN=[folder]", "DATA.TEST=[folder]", "DATALOADER.BSZ=4", "DATA.NUM_CLASSES=2")
UNSMOOTHED = ("LOSS.LABEL_SMOOTHING=0", "AUG.MIXUP_PROB=0")
TABLE = ("DATA.TRAIN=[labels.csv]", "DATA.TEST=[labels.csv]", *SMALL[2:])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """20 cats and 10 dogs in folders without train/; each of the last 5 dogs is a copy of one."""
    root = tmp_path_factory.mktemp("pets")
    for name, count, copies in (("cat", 20, 0), ("dog", 5, 5)):
        (root / name).mkdir()
        for number in range(count + copies):
            content = png_bytes(number % count + 100 * (name == "dog"))
            (root / name / f"{number:02}.png").write_bytes(content)
    rows = [
        f"{n}/{i:02}.png,{n},person {i // 2}"
        for n, c in (("cat", 20), ("dog", 10))
        for i in range(c)
    ]
    (root / "labels.csv").write_text("\n".join(["path,label,group", *rows]))
    return root


def parts_of(root, *words, sets=SMALL):
    """The names of the images of the training, validation and test loaders."""
    task = task_of(get_config(None, [*sets, f"DATA.PATH={root}", *words]))
    loader = task.train_loader(DistInfo())
    task.class_names = loader.classes
    found = [loader.samples.dataset]
    for part in ("val", "test"):
        found += [test.dataset for test in task.test_loaders(DistInfo(), part=part).values()]
    return [{data.sample_name(i) for i in range(len(data))} for data in found]


def everything(root):
    return {str(p.relative_to(root)) for p in root.glob("*/*.png")}


def refusal(error, root, *words, sets=SMALL):
    with pytest.raises(error) as caught:
        parts_of(root, *words, sets=sets)
    return str(caught.value)


def test_a_fraction_is_held_out_and_copies_stay_together(root):
    train, val, same = parts_of(root, "DATA.VAL_FRACTION=0.2")
    assert val == same
    assert train | val == everything(root)
    assert not train & val
    assert len([name for name in val if name.startswith("cat")]) == 4
    for dog in range(5):
        copies = {f"dog/{dog:02}.png", f"dog/{dog + 5:02}.png"}
        assert copies <= train or copies <= val
    torn = parts_of(root, "DATA.VAL_FRACTION=0.5", "DATA.GROUP_BY=none", "DATA.SPLIT_SEED=1")[1]
    assert any((f"dog/{d:02}.png" in torn) != (f"dog/{d + 5:02}.png" in torn) for d in range(5))


def test_images_that_belong_together_in_two_sets_are_named(root, caplog):
    """Two tables of other images of the same persons, and a table of copies."""
    header, *rows = (root / "labels.csv").read_text().splitlines()
    for name, part in (("even", rows[::2]), ("odd", rows[1::2])):
        (root / f"{name}.csv").write_text("\n".join([header, *part]))
    own = ("DATA.VAL_FRACTION=0.4", "DATA.GROUP_BY=column")
    both = ("DATA.TRAIN=[even.csv, odd.csv]", "DATA.TEST=[even.csv]", *TABLE[2:])
    parts_of(root, *own, sets=both)
    assert "of 6 images that are held out of even.csv are in groups with training" in caplog.text
    caplog.clear()
    copies = ("DATA.TRAIN=[labels.csv, folder]", "DATA.TEST=[labels.csv]", *TABLE[2:])
    parts_of(root, own[0], "DATA.GROUP_BY=content", sets=copies)
    assert "held out of labels.csv are identical to training images of folder" in caplog.text
    assert "in groups" not in caplog.text
    caplog.clear()
    parts_of(root, own[0], "DATA.GROUP_BY=none", sets=copies)
    parts_of(root, *own, sets=TABLE)
    assert "held out of" not in caplog.text


def test_folds_cover_every_image_once(root):
    folds = [parts_of(root, "DATA.FOLDS=5", f"DATA.FOLD={fold}") for fold in range(5)]
    held_out = [name for _, val, _ in folds for name in val]
    assert len(held_out) == len(set(held_out)) == 30
    assert all(train == everything(root) - val for train, val, _ in folds)
    assert all({name[:3] for name in val} == {"cat", "dog"} for _, val, _ in folds)


def test_nested_validation_keeps_the_test_images_apart(root):
    words = ("DATA.VAL=[folder]", "DATA.VAL_FRACTION=0.25")
    for key in ("DATA.FOLDS=5", "DATA.TEST_FRACTION=0.2"):
        train, val, test = parts_of(root, *words, key)
        assert train | val | test == everything(root)
        assert len(train) + len(val) + len(test) == 30
        # the test images do not depend on the validation images
        other = parts_of(root, words[0], "DATA.VAL_FRACTION=0.5", key)
        assert other[2] == test
        assert other[1] != val


def test_a_column_of_groups_is_respected(root):
    words = ("DATA.VAL_FRACTION=0.3", "DATA.GROUP_BY=column")
    train, val, _ = parts_of(root, *words, sets=TABLE)
    people = [{int(name[4:6]) // 2 for name in part} for part in (train, val)]
    assert not people[0] & people[1]
    # the copies connect all people who have dogs
    message = refusal(DataError, root, "DATA.VAL_FRACTION=0.3", sets=TABLE)
    assert "1 of 2 classes have fewer than 2 images (or groups" in message
    assert "dog 1;" in message
    assert "folder has no group column" in refusal(
        ConfigError, root, "DATA.VAL_FRACTION=0.3", "DATA.GROUP_BY=column"
    )


@pytest.mark.parametrize("task", ["classification", "multilabel"])
def test_a_table_for_evaluation_has_the_learned_classes(root, task, caplog):
    for name, rows in (("tr", "012012"), ("va", "20"), ("other", "3")):
        lines = [f"cat/{i:02}.png,class {label}" for i, label in enumerate(rows)]
        (root / f"{name}.csv").write_text("\n".join(["path,label", *lines]))
    words = [f"TASK={task}", "DATA.TRAIN=[tr.csv]", "DATA.NUM_CLASSES=3", "DATALOADER.BSZ=2"]
    cfg = get_config(None, [*words, f"DATA.PATH={root}", "DATA.TEST=[va.csv]", *UNSMOOTHED])
    task = task_of(cfg)
    task.class_names = task.train_loader(DistInfo()).classes
    data = task.test_loaders(DistInfo())["va.csv"].dataset
    assert data.classes == ["class 0", "class 1", "class 2"]
    targets = data.targets if data.targets.ndim == 1 else data.targets.argmax(1)
    assert targets.tolist() == [2, 0]
    assert "va.csv: 1 of 3 classes have no images, such as class 1" in caplog.text
    assert check_data(cfg).is_usable
    found = check_data(cfg, ["DATA.TEST=[other.csv]"])
    assert "added: class 3" in "".join(found.problems)


def test_weights_follow_their_images(root, tmp_path):
    rows = [f"{i}.png,{'ab'[i % 2]},{i}" for i in range(8)]
    for i in range(8):
        (tmp_path / f"{i}.png").write_bytes(png_bytes(i))
    (tmp_path / "labels.csv").write_text("\n".join(["path,label,weight", *rows]))
    cfg = get_config(None, [*TABLE, f"DATA.PATH={tmp_path}", "DATA.VAL_FRACTION=0.25"])
    data = task_of(cfg).train_loader(DistInfo()).samples.dataset
    assert [f"{weight:.0f}.png" for weight in data.weights] == [
        data.sample_name(i) for i in range(len(data))
    ]
    data.reorder_classes(["b", "a"])
    assert [data[i][1] for i in range(6)] == data.targets.tolist()


CONFLICTS = {
    "fold out of range": (("DATA.FOLDS=3", "DATA.FOLD=3"), "numbered from 0 to DATA.FOLDS - 1"),
    "one fold": (("DATA.FOLDS=1",), "expected 0, or at least 2"),
    "fold and fraction": (("DATA.FOLDS=3", "DATA.VAL_FRACTION=0.1"), "both select the validation"),
    "fold and test": (
        ("DATA.FOLDS=3", "DATA.TEST_FRACTION=0.1", "DATA.VAL=[folder]"),
        "both select the test images",
    ),
    "test without val": (("DATA.TEST_FRACTION=0.1",), "set DATA.VAL too"),
    "not a training set": (
        ("DATA.VAL_FRACTION=0.1", "DATA.TEST=[fake]"),
        "in both DATA.TRAIN (folder) and DATA.TEST (fake)",
    ),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_contradictions_are_refused(root, name):
    words, sentence = CONFLICTS[name]
    assert sentence in refusal(ConfigError, root, *words)


def test_too_few_images_of_a_class_are_named_and_counted(root, tmp_path):
    message = refusal(DataError, root, "DATA.FOLDS=6")
    assert "1 of 2 classes have fewer than 6 images" in message
    assert "dog 5" in message
    assert "no test split" in refusal(
        DataError, root, "DATA.TRAIN=[digits]", "DATA.TEST=[digits]", "DATA.VAL=[digits]",
        "DATA.NUM_CLASSES=10",
    )  # fmt: skip
    names = [f"{i}.png" for i in range(4)]
    for i, name in enumerate(names):
        (tmp_path / name).write_bytes(png_bytes(i))
    rows = [f"{name},{label},{group}" for name, label, group in zip(names, "aabb", "xyxy")]
    rows[3] = "3.png,c,x"
    (tmp_path / "labels.csv").write_text("\n".join(["path,label,group", *rows]))
    words = ("DATA.VAL_FRACTION=0.5", "DATA.NUM_CLASSES=3", "DATALOADER.BSZ=1")
    message = refusal(DataError, tmp_path, *words, sets=TABLE)
    assert "2 of 3 classes have fewer than 2 images" in message


def test_classes_are_counted(root, tmp_path):
    words = ["DATA.NUM_CLASSES=auto", f"DATA.PATH={root}", *SMALL[:3], "DATA.VAL_FRACTION=0.2"]
    for wrong, message in (
        (("DATA.TRAIN=[foldr]", "DATA.VAL_FRACTION=0"), "did you mean 'folder'"),
        ((*TABLE, "DATA.KWARGS.label_column=lable"), "did you mean 'label'"),
        ((*TABLE, "DATA.KWARGS.separator=''"), "DATA.KWARGS.separator is empty"),
    ):
        with pytest.raises(ConfigError, match=message):
            with_num_classes(get_config(None, [*words, *wrong, "DATA.NUM_CLASSES=auto"]))
    with pytest.raises(ConfigError, match="DATA.NUM_CLASSES is auto, .* to a number"):
        task_of(get_config(None, words))
    assert with_num_classes(get_config(None, words)).DATA.NUM_CLASSES == 2
    with pytest.raises(DataError, match=r"there is no folder .*none"):
        with_num_classes(get_config(None, [*words, f"DATA.PATH={tmp_path}/none"]))
    with pytest.raises(ConfigError, match="expected int or auto, got 'many'"):
        get_config(None, ["DATA.NUM_CLASSES=many"])
    assert get_config(None, ["DATA.NUM_CLASSES=3"]).DATA.NUM_CLASSES == 3


@pytest.mark.parametrize("task", ["classification", "multilabel"])
def test_used_columns_and_an_unusual_share_are_logged(tmp_path, task, caplog):
    """One line each: a group with half of the images makes VAL_FRACTION 0.2 hold out 50 %."""
    rows = [f"{i}.png,{'ab'[i % 2]},{'big' if i < 8 else i},1" for i in range(16)]
    for i in range(16):
        (tmp_path / f"{i}.png").write_bytes(png_bytes(i))
    (tmp_path / "labels.csv").write_text("\n".join(["path,label,group,weight", *rows]))
    words = [f"TASK={task}", f"DATA.PATH={tmp_path}", "DATA.FOLDS=4", "DATA.FOLD=0"]
    with_num_classes(get_config(None, [*TABLE, *words, "DATA.NUM_CLASSES=auto"]))
    parts_of(tmp_path, *words, sets=TABLE)
    lines = [record.getMessage() for record in caplog.records]
    for text in ("50 % of the images are held out instead of 25 %, because groups of up to 8",
                 "the column or field of groups is used",
                 "the column or field of weights is used"):  # fmt: skip
        assert len([line for line in lines if text in line]) == 1, lines


def test_a_single_class_is_logged(root, tmp_path, caplog):
    """Also of the images that are there, if the list of classes is longer."""
    for number in range(8):
        (tmp_path / f"train/images/{number}.png").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"train/images/{number}.png").write_bytes(png_bytes(number))
    cfg = get_config(None, [*SMALL, f"DATA.PATH={tmp_path}", "DATA.VAL_FRACTION=0.25"])
    check_data(cfg)
    text = "all images have the same class, images, so there is nothing to learn"
    assert caplog.text.count(text) == 1
    caplog.clear()
    check_data(get_config(None, [*SMALL, f"DATA.PATH={root}", "DATA.VAL_FRACTION=0.2"]))
    assert "nothing to learn" not in caplog.text
