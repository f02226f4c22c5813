"""How a value is read: by the type of its key's default, from YAML as from the command line."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.common.marks import cases
from vil.config import ConfigError, defaults, dump, get_config, load_config, override
from vil.config.legacy import SPELLINGS
from vil.config.yaml_source import find, packaged_root
from vil.workflows.configure import make_config

MSVIT = "MODEL.VIT.MSVIT"
ACCEPTED = [
    ("OPTIM.LR", "1", 1.0),
    ("OPTIM.LR", "1e-3", 1e-3),
    ("OPTIM.LR", ".5", 0.5),
    ("OPTIM.EPOCHS", "30", 30),
    (f"{MSVIT}.MODE", "-1", -1),
    ("AMP.ENABLED", "true", True),
    ("AMP.ENABLED", "True", True),
    ("AMP.TF32", "no", False),
    ("DATA.TARGETMAP", "123", "123"),
    ("DATA.TARGETMAP", "1e5", "1e5"),
    ("DATA.TARGETMAP", "'None'", "None"),
    ("AUG.SCALE", "(0.2, 1)", (0.2, 1.0)),
    ("AUG.SCALE", "[0.2, 1]", (0.2, 1.0)),
    ("INPUT.MEAN", "(0, 0.5, 1e-1)", [0.0, 0.5, 0.1]),
    ("DATA.TRAIN", "['digits', 'fake']", ("digits", "fake")),
    ("DATA.TRAIN", "[digits]", ("digits",)),
    ("AUG.MIXCUT_MINMAX", "[0.2, 0.8]", [0.2, 0.8]),
    ("AUG.MIXCUT_MINMAX", "[]", []),
]
FREE = [
    ("3", 3),
    ("1e-3", 1e-3),
    ("true", True),
    ("null", None),
    ("(1, 2)", [1, 2]),
    ("[1, [a, b]]", [1, ["a", "b"]]),
    ("abc", "abc"),
    ("'7'", "7"),
]
WRONG_TYPE = {bool: "maybe", int: "1.5", float: "abc", str: "[a]", list: "a,5", tuple: "(5"}
OUT_OF_RANGE = {int: "-99", float: "-99", str: "No Such !", list: "[9, -9, 9, -9]"}


def value_of(cfg, key):
    return defaults.leaves(cfg)[key]


def refusal(file=None, opts=()):
    with pytest.raises(ConfigError) as caught:
        get_config(file, opts)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def answer(opts=(), file=None):
    """The refusal; without one, a text that says so."""
    try:
        get_config(file, opts)
    except ConfigError as error:
        return str(error) if "\n" not in str(error) else f"more than a line: {error!r}"
    return "accepted"


def as_yaml(tmp_path, key, text):
    """A file that sets one key."""
    *path, name = key.split(".")
    lines = [f"{'  ' * depth}{step}:" for depth, step in enumerate(path)]
    file = tmp_path / "one.yaml"
    file.write_text("\n".join([*lines, f"{'  ' * len(path)}{name}: {text}"]) + "\n")
    return file


@pytest.mark.parametrize(("key", "text", "value"), ACCEPTED)
def test_accepted(tmp_path, key, text, value):
    for cfg in (get_config(opts=[key, text]), get_config(as_yaml(tmp_path, key, text))):
        assert value_of(cfg, key) == value
        assert type(value_of(cfg, key)) is type(value)


@pytest.mark.parametrize(("text", "value"), FREE)
def test_open_node_takes_new_keys_from_both_sides(tmp_path, text, value):
    for node in defaults.EXTENSIBLE:
        key = f"{node}.brand_new"
        for cfg in (get_config(opts=[key, text]), get_config(as_yaml(tmp_path, key, text))):
            assert value_of(cfg, key) == value
            assert type(value_of(cfg, key)) is type(value)


def test_options_may_be_mixed_and_typed():
    opts = ["OPTIM.LR=2", "OPTIM.OPT", "sgd", "DATA.KWARGS.url=a=b", "AUG.SCALE", (0.5, 1)]
    cfg = get_config(opts=opts)
    assert (cfg.OPTIM.LR, cfg.OPTIM.OPT, cfg.DATA.KWARGS.url) == (2.0, "sgd", "a=b")
    assert cfg.AUG.SCALE == (0.5, 1.0)
    assert get_config(opts=["DATA.KWARGS", "{a: 1, b: x}"]).DATA.KWARGS == {"a": 1, "b": "x"}
    assert "OPTIM.LR: no value follows" in refusal(opts=["OPTIM.LR"])


def test_python_values_are_not_read_as_text():
    kwargs = {"separator": "\t", "images": "a\\b", "label_column": "no", "n": None}
    weights = [0.123456789] * 2000
    cfg = make_config(
        None,
        {
            "DATA.KWARGS": kwargs | {"label_columns": ["1", "b\\n"]},
            "DATA.TRAIN": ["a\\b.csv", Path("c.csv")],
            "LOSS.CLASS_WEIGHTS": weights,
            "OPTIM.LR": np.float64(0.5),
            "AUG.MIXCUT_MINMAX": [np.float32(0.5), 1],
        },
    )
    found = {key: value for key, value in cfg.DATA.KWARGS.items() if key in kwargs}
    assert found == kwargs
    assert cfg.DATA.KWARGS.label_columns == ["1", "b\\n"]
    assert cfg.DATA.TRAIN == ("a\\b.csv", "c.csv")
    assert list(cfg.LOSS.CLASS_WEIGHTS) == [str(weight) for weight in weights]
    assert (cfg.OPTIM.LR, cfg.AUG.MIXCUT_MINMAX) == (0.5, [0.5, 1.0])
    assert make_config(None, {"DATA.KWARGS.n": 3, "DATA.KWARGS": {}}).DATA.KWARGS == {}
    with pytest.raises(ConfigError, match="DATA.VAL: expected plain values in a list, got a map"):
        make_config(None, {"DATA.VAL": [{}]})


def test_every_key_refuses_a_wrong_type(tmp_path):
    wrong = []
    for key, entry in defaults.KEYS.items():
        text, expected = WRONG_TYPE[type(entry.default)], f"{key}: expected "
        found = [answer([key, text]), answer(file=as_yaml(tmp_path, key, text))]
        if (key, "None") not in SPELLINGS:  # two keys took it in the 2021 original
            found.append(answer([key, "None"]))
        by_line = found[0].startswith(f"command line: {expected}")
        if not by_line or any(expected not in each for each in found):
            wrong.append((key, found))
    assert not wrong


STRING_LISTS = ("DATA.TRAIN", "DATA.TEST", "DATA.VAL")


def test_every_rule_refuses_something():
    wrong = []
    for key, entry in defaults.KEYS.items():
        if not entry.check:
            continue
        text = "('',)" if key in STRING_LISTS else OUT_OF_RANGE.get(type(entry.default), "[2, -1]")
        if key == "INPUT.MEAN":  # any numbers will do, up to one per channel
            text = "[]"
        if key in ("DATA.PATH", "OUTPUT_DIR"):  # any folder will do, but one there must be
            text = ""
        found = answer([key, text])
        if not found.startswith(f"command line: {key}: expected {entry.check.sentence}, got"):
            wrong.append((key, found))
    assert not wrong


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1" * 5000, "-" + "9" * 400])
def test_numbers_are_finite(value):
    assert "OPTIM.WD: expected float" in refusal(opts=["OPTIM.WD", value])
    assert "OPTIM.EPOCHS: expected int" in refusal(opts=["OPTIM.EPOCHS", value])


@pytest.mark.parametrize(
    ("opts", "words"),
    [
        ([f"{MSVIT}.SW_EXACT=1", f"{MSVIT}.MODE=1"], "exact window with random shift"),
        ([f"{MSVIT}.SW_EXACT=1", f"{MSVIT}.MODE=-1"], "SW_EXACT 1"),
        ([f"{MSVIT}.ATTN_TYPE=longformerhand", f"{MSVIT}.BACKEND=triton"], "pins a backend"),
        (["AUG.MIXUP_PROB=1"], "nothing to mix"),
        (["SOLVER.LR_POLICY=cosine", "OPTIM.EPOCHS=3"], "longer than the run"),
        (["OPTIM.LR=1e-5", "SOLVER.MIN_LR=1e-4"], "above its peak"),
    ],
)
def test_values_that_do_not_go_together(opts, words):
    message = refusal(opts=opts)
    assert words in message
    assert all(option.partition("=")[0] in message for option in opts)


def test_nothing_conflicts_that_is_switched_off():
    get_config(opts=["AUG.MIXUP_PROB=1", "AUG.MIXCUT_MINMAX=[0.2, 0.8]"])
    get_config(opts=["OPTIM.EPOCHS=3"])
    get_config(opts=[f"{MSVIT}.SW_EXACT=-1", f"{MSVIT}.MODE=8"])


def shipped():
    root = packaged_root()
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*.yaml"))


@pytest.mark.parametrize("name", cases(shipped()))
def test_dump_of_every_shipped_config_loads_back(tmp_path, name):
    cfg = get_config(name)
    first = tmp_path / "first.yaml"
    first.write_text(dump(cfg))
    again = get_config(first)
    assert again == cfg
    assert dump(again) == first.read_text()
    assert find(f"configs/{name}") == find(name)


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | NUMBERS
VALUES = st.recursive(SCALARS | TEXT, lambda inner: st.lists(inner, max_size=3), max_leaves=5)


@settings(max_examples=8, deadline=None)
@given(VALUES)
@example(2**63)
@example([-(2**64) - 1])
def test_dump_loads_back_whatever_an_open_node_holds(tmp_path_factory, value):
    cfg = defaults.tree()
    cfg.DATA.KWARGS["extra"] = value
    file = tmp_path_factory.getbasetemp() / "open.yaml"
    file.write_text(dump(cfg), encoding="utf-8")
    assert get_config(file) == cfg
    assert dump(get_config(file)) == file.read_text(encoding="utf-8")


def test_sources_name_the_last_who_set_a_key(tmp_path):
    (tmp_path / "base.yaml").write_text("OPTIM:\n  LR: 1e-3\n  WD: 0.1\n")
    (tmp_path / "top.yaml").write_text("_BASE_: base.yaml\nOPTIM:\n  WD: 0.2\n  OPT: sgd\nDATA:\n")
    cfg, sources = load_config(tmp_path / "top.yaml", ["OPTIM.OPT", "adam"], {"DATA.PATH": "/env"})
    assert (cfg.OPTIM.LR, cfg.OPTIM.WD, cfg.OPTIM.OPT) == (1e-3, 0.2, "adam")
    assert sources == {
        "OPTIM.LR": f"{tmp_path}/base.yaml:2",
        "OPTIM.WD": f"{tmp_path}/top.yaml:3",
        "OPTIM.OPT": "command line",
        "DATA.PATH": "environment",
    }


def test_a_config_made_before_a_key_was_declared_gets_its_default():
    cfg = get_config().clone()
    cfg.defrost()
    del cfg.OPTIM["EMA"], cfg.MODEL["VIT"]
    cfg.DATA.KWARGS["n"] = 3
    changed = override(cfg, ["OPTIM.LR=0.5"])
    assert changed == get_config(None, ["OPTIM.LR=0.5", "DATA.KWARGS.n=3"])
