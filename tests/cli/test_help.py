"""The list of commands, and the order of flags and keys."""

import re

from tests.common.small_runs import succeeds, vil
from vil.cli import COMMANDS


def test_the_overview_lists_every_command():
    shown = succeeds("--help")
    assert shown == vil("-h").out
    assert vil() == (2, "", shown)
    for name, about in COMMANDS.items():
        assert re.search(rf"^  {name} +{about}$", shown, re.MULTILINE)


def test_flags_and_keys_stand_in_any_order():
    words = ["OPTIM.LR", "3", "--seed", "4", "OPTIM.EPOCHS=7", "--data", "D", "SEED", "5"]
    shown = succeeds("config", *words, "--diff")
    for line in ("OPTIM.LR: 3.0", "OPTIM.EPOCHS: 7", "DATA.PATH: D", "SEED: 4"):
        assert f"\n{line}  #" in f"\n{shown}"
