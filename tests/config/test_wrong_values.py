"""Typos and invalid values of every key are refused in one line, by the command and in files."""

import random

import pytest

from tests.common.small_runs import vil
from vil.config import defaults
from vil.config.coercion import coerce
from vil.config.legacy import SPELLINGS

pytestmark = pytest.mark.long
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ_"
USAGE = 2
EDITS = {
    "insert": lambda key, at, letter: key[:at] + letter + key[at:],
    "delete": lambda key, at, letter: key[:at] + key[at + 1 :],
    "replace": lambda key, at, letter: key[:at] + letter + key[at + 1 :],
    "swap": lambda key, at, letter: key[:at] + key[at + 1 : at + 2] + key[at] + key[at + 2 :],
}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def given(key, text, in_a_file) -> list[str]:
    """Return the arguments that set a key, on the command line or in a file."""
    if not in_a_file:
        return [f"{key}={text}"]
    path = key.split(".")
    with open("x.yaml", "w") as file:
        for depth, name in enumerate(path[:-1]):
            file.write(f"{'  ' * depth}{name}:\n")
        file.write(f"{'  ' * (len(path) - 1)}{path[-1]}: {text}\n")
    return ["--config-file", "x.yaml"]


def typos(count):
    """Return (wrong key, correct key) pairs, with each kind of edit equally often."""
    draw, found = random.Random(17), {}
    while len(found) < count:
        key, edit = draw.choice(list(defaults.KEYS)), list(EDITS.values())[len(found) % len(EDITS)]
        wrong = edit(key, draw.randrange(len(key)), draw.choice(LETTERS))
        if wrong not in defaults.KEYS and all(wrong.split(".")):
            found[wrong] = key
    return list(found.items())


def test_typos():
    """All are refused, and nine of ten answered with the correct key."""
    right = 0
    for number, (wrong, key) in enumerate(typos(200)):
        ended = vil("train", *given(wrong, defaults.KEYS[key].default or "''", number % 2 == 1))
        assert (ended.code, ended.err.count("\n")) == (USAGE, 1), ended.err
        assert f" {wrong}: unknown key" in ended.err
        right += ended.err.endswith(f"did you mean {key}?\n")
    assert right >= 180


WRONG_TYPES = {
    bool: ("maybe", "2", "[true]", "None"),
    int: ("1.5", "many", "[1]", "nan", "None"),
    float: ("fast", "[0.5]", "inf", "None"),
    str: ("[a, b]", "None"),
    list: ("[[1], [2]]", "(1", "None"),
    tuple: ("[[a]]", "(1", "None"),
}
OTHER_VALUES = {  # of which each rule refuses some
    int: ("-99", str(10**12)),
    float: ("-99", "99"),
    str: ("No Such !", ""),
    list: ("[]", "[9, 9, 9, 9]", "[2, 1]", "[9, -9, 9, -9]"),
    tuple: ("[9, 9, 9, 9]", "[2, 1]", "[-9, -9]", "('',)"),
}


def wrong_values():
    """Yield (key, text, message): wrong types, and values that the key's rule does not allow."""
    for key, (_, default, _, rule, *_) in defaults.KEYS.items():
        for text in WRONG_TYPES[type(default)]:
            if (key, text) not in SPELLINGS:  # which the 2021 original wrote for empty
                yield key, text, f"{key}: expected "
        yield key, "{a: 1}", f"{key}.a: unknown key"
        if rule:
            refused = [text for text in OTHER_VALUES[type(default)] if not allowed(key, text)]
            assert refused, f"{key}: no value that it refuses is tried"
            for text in refused:
                yield key, text or "''", f"{key}: expected {rule.sentence}, got "


def allowed(key, text):
    declared = defaults.KEYS[key]
    try:
        return declared.check.holds(coerce(text, declared.default, declared.element))
    except ValueError:
        return True  # a wrong type: tried above


@pytest.mark.parametrize("in_a_file", [False, True])
def test_wrong_values_of_every_key(in_a_file):
    for key, text, said in wrong_values():
        ended = vil("train", *given(key, text, in_a_file))
        assert (ended.code, ended.err.count("\n")) == (USAGE, 1), f"{key} {text}: {ended.err}"
        assert said in ended.err
