"""Every command line and Python example of the first edition's README and docs still works.

legacy/first_edition_commands.txt has the lines of its ```bash blocks with the page they stood on,
legacy/first_edition_python/ its ```python blocks, both word for word.

A command is understood if a wrong key behind its words is all that is wrong with them. With -m long
each is run as well, in a folder with the files it names, its words followed by smaller settings.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.old_edition import Commands

from tests.common.doc_commands import (
    LEGACY,
    ROOT,
    WRONG,
    expanded,
    has_keys,
    run_line,
    vil_words,
    write_files,
)
from tests.common.marks import cases

LINES = list(
    dict.fromkeys(
        line.partition("\t")[2]
        for line in (LEGACY / "first_edition_commands.txt").read_text().splitlines()
    )
)
PAGES: dict[str, list[Path]] = {}
for file in sorted((LEGACY / "first_edition_python").glob("*.py")):
    PAGES.setdefault(re.sub(r"^\d+_|_\d+$", "", file.stem), []).append(file)

NOT_OURS = ("chromium", "seq", "for")
COMMANDS = {line: words for line in LINES if (words := vil_words(line))}
KEYED = [line for line, words in COMMANDS.items() if has_keys(words)]


@pytest.fixture(scope="module")
def commands():
    started = Commands()
    yield started
    started.close()


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder with the files that the commands name."""
    write_files(tmp_path)
    return tmp_path


# ------------------------------------------------------------------------------------- commands


@pytest.mark.long
@pytest.mark.parametrize("line", cases(KEYED))
def test_every_word_is_understood(line, commands, place):
    ended = commands(place, *expanded(COMMANDS[line], place), WRONG, "1")
    assert ended.code == 2, ended.err
    assert f"{WRONG}: unknown key" in ended.err, ended.err


def test_scripts_and_configs_exist():
    """Of the lines that start something else than vil."""
    count = 0
    for line in LINES:
        words = shlex.split(line)
        for word in words:
            if re.fullmatch(r"(\./)?(scripts|tools|benchmarks)/\w+\.(sh|py)", word):
                assert (ROOT / word).is_file(), line
                count += 1
            elif re.match(r"(imagenet|coco|digits|scenes)/", word):
                assert (ROOT / "configs" / word).is_file(), line
                count += 1
        if words[0].startswith("scripts/coco_"):
            assert (ROOT / "configs/coco" / f"{words[1]}_1x.yaml").is_file()
    assert count > 30


def test_every_line_is_checked():
    for line in LINES:
        script = re.search(r"(^|\s)(\./)?(scripts|tools|benchmarks)/", line)
        assert line in COMMANDS or script or shlex.split(line)[0] in NOT_OURS, line
    assert len(COMMANDS) > 50


@pytest.mark.long
@pytest.mark.parametrize("line", cases(line for line in COMMANDS if line not in KEYED))
def test_commands_without_keys(line, commands, place):
    run_line(commands, COMMANDS[line], place)


@pytest.mark.long
@pytest.mark.parametrize("line", cases(KEYED))
def test_every_command_runs(line, commands, place):
    shared = {"/shared/runs/small": "runs/small"}
    run_line(commands, [shared.get(word, word) for word in COMMANDS[line]], place)


# --------------------------------------------------------------------------------------- Python

# The files of a page one after the other, in one namespace: a later one may use an earlier one's
# names.
RUN_ALL = """
import sys
names = {"__name__": "__main__"}
for path in sys.argv[1:]:
    print("in", path, file=sys.stderr)
    exec(compile(open(path).read(), path, "exec"), names)
"""


@pytest.mark.long
@pytest.mark.parametrize("page", cases(PAGES))
def test_python_examples_run(page, place):
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", RUN_ALL, *PAGES[page]]
    ended = subprocess.run(command, cwd=place, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
