"""The help of the commands, the version, and the order of flags and keys."""

import re

import pytest

from tests.common.small_runs import succeeds, vil
from vil.cli import COMMANDS


def test_the_overview_lists_every_command():
    shown = succeeds("--help")
    assert shown == vil("-h").out
    assert vil() == (2, "", shown)
    for name, about in COMMANDS.items():
        assert re.search(rf"^  {name} +{about}$", shown, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_examples(name):
    assert re.search(rf"^ *vil {name}\b", succeeds(name, "--help"), re.MULTILINE)


WITHOUT_CONFIG = ("benchmark attention", "visualize pattern", "detect check")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in WITHOUT_CONFIG])
def test_every_command_with_a_config_takes_the_same_flags(name):
    shown = succeeds(name, "--help")
    for flag in ("--config-file", "--data", "--output_dir", "--seed", "KEY VALUE"):
        assert flag in shown


def test_the_version_is_the_package_s():
    assert re.fullmatch(r"\d+\.\d+.*\n", succeeds("--version"))


def test_flags_and_keys_stand_in_any_order():
    words = ["OPTIM.LR", "3", "--seed", "4", "OPTIM.EPOCHS=7", "--data", "D", "SEED", "5"]
    shown = succeeds("config", *words, "--diff")
    for line in ("OPTIM.LR: 3.0", "OPTIM.EPOCHS: 7", "DATA.PATH: D", "SEED: 4"):
        assert f"\n{line}  #" in f"\n{shown}"
