"""A copy of the package without vil/tasks/detection and its entry passes the other tests."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.common.doc_commands import ROOT

# Where a missing task would be noticed. The whole suite passes too, but takes minutes.
TESTS = (
    "tests/config", "tests/workflows/test_python_api.py", "tests/workflows/test_stream_image.py",
    "tests/workflows/test_embed.py", "tests/cli/test_help.py", "tests/cli/test_commands.py",
    "tests/test_docs.py", "tests/test_layering.py", "tests/test_moved_names.py",
    "tests/test_old_files.py",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.detection
def test_the_other_tests_pass(tmp_path):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        if not name.startswith(("vil/tasks/detection/", "tests/tasks/detection/")):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    entry = tmp_path / "vil/tasks/__init__.py"
    text = re.sub(r"detection, |^TASKS.*detection.*\n", "", entry.read_text(), flags=re.MULTILINE)
    assert "detection" not in text
    entry.write_text(text)
    for words in (["init", "-q"], ["add", "."]):  # tests list its files
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
