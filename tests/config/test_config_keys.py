"""Typing errors in keys: never accepted, nearly always answered with the right key."""

import random

import pytest

from vil.config import ConfigError, defaults, get_config

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ_"


def refusal(file=None, opts=()):
    with pytest.raises(ConfigError) as caught:
        get_config(file, opts)
    return str(caught.value)


def typo(key, draw):
    """One letter dropped, doubled by another, replaced, or swapped with its neighbour."""
    place = draw.choice([i for i, letter in enumerate(key) if letter != "."])
    letter = draw.choice(LETTERS)
    edits = [
        key[:place] + key[place + 1 :],
        key[:place] + letter + key[place:],
        key[:place] + letter + key[place + 1 :],
        key[:place] + key[place + 1 : place + 2] + key[place] + key[place + 2 :],
    ]
    return draw.choice(edits)


def typos(count):
    draw = random.Random(0)
    found = {}
    while len(found) < count:
        key = draw.choice(list(defaults.KEYS))
        wrong = typo(key, draw)
        if wrong not in defaults.KEYS and all(wrong.split(".")):
            found[wrong] = key
    return found


@pytest.mark.long
def test_two_hundred_typos(tmp_path):
    right = 0
    for number, (wrong, key) in enumerate(typos(200).items()):
        value = str(defaults.KEYS[key].default)
        if number % 2:
            message = refusal(opts=[wrong, value])
        else:
            *path, name = wrong.split(".")
            steps = [f"{' ' * depth}{step}:\n" for depth, step in enumerate(path)]
            (tmp_path / "x.yaml").write_text(f"{''.join(steps)}{' ' * len(path)}{name}: {value}\n")
            message = refusal(tmp_path / "x.yaml")
            assert f"x.yaml:{len(path) + 1}: " in message
        assert f"{wrong}: unknown key" in message
        right += message.endswith(f"did you mean {key}?")
    assert right >= 190, f"{right} of 200 typos were answered with the right key"


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ("LR", "OPTIM.LR"),
        ("OPTIM.LRR", "OPTIM.LR"),
        ("optim.lr", "OPTIM.LR"),
        ("SOLVER.LR", "OPTIM.LR"),
        ("MODEL.VIT.MSVIT.ATN_TYPE", "MODEL.VIT.MSVIT.ATTN_TYPE"),
        ("MSVIT.ATTN_TYPE", "MODEL.VIT.MSVIT.ATTN_TYPE"),
        ("EPOCHS", "OPTIM.EPOCHS"),
        ("AUG.TIMM_AUG.RE_PORB", "AUG.TIMM_AUG.RE_PROB"),
    ],
)
def test_suggestions(wrong, key):
    assert refusal(opts=[wrong, "1"]) == f"command line: {wrong}: unknown key; did you mean {key}?"


def test_nonsense_gets_no_suggestion():
    assert refusal(opts=["QQQQ.ZZZZ", "1"]) == "command line: QQQQ.ZZZZ: unknown key"
    assert "unknown key" in refusal(opts=["X" * 100_000, "1"])


def test_new_names_in_an_open_node_are_arguments():
    assert get_config(opts=["AUG.TIMM_AUG.interpolation", "random"])
    for name in ("not-a-name", "a.b", ""):
        assert "unknown key" in refusal(opts=[f"DATA.KWARGS.{name}", "1"])
