"""One thread per process: scripts/test.sh runs the suite in two, and tests start more. And none of
the user's own choices of backends.

Set in the environment before torch is imported, so that the processes tests start inherit it. They
find `tests.common` too.
"""

import os
import signal
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
CACHE = tempfile.TemporaryDirectory(prefix="vil-cache-")
os.environ["VIL_CACHE"] = CACHE.name
# compiled once, by one of pytest-xdist's processes, and again if its sources change
NATIVE = os.environ.setdefault("VIL_TEST_NATIVE", str(ROOT / ".pytest_cache/native"))
Path(NATIVE).mkdir(parents=True, exist_ok=True)
Path(CACHE.name, "native").symlink_to(NATIVE, target_is_directory=True)

import pytest  # noqa: E402
import torch  # noqa: E402

from tests.common.small_runs import TINY, succeeds  # noqa: E402
from vil.ops.dispatch import CHOICES  # noqa: E402
from vil.ops.native import library  # noqa: E402
from vil.tasks import TASKS  # noqa: E402

torch.set_num_threads(1)
collect_ignore_glob = [] if "detection" in TASKS else ["tasks/detection/*", "*/test_*detect*"]


@pytest.fixture(autouse=True)
def same_start():
    """Random numbers are those of every run, and a test selects no backends for the next one."""
    torch.manual_seed(0)
    CHOICES.clear()
    yield
    CHOICES.clear()


@pytest.fixture
def heard_signals():
    """Signals are not ignored, as they are in a suite that nohup or a shell's `&` started."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def without_native(monkeypatch):
    """The native library cannot be used, as on a machine without a compiler."""
    monkeypatch.setattr(library, "_off", ["off for this test"])


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run of one epoch on generated images of four classes. Tests that change it make a copy."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    words = (*TINY, "OPTIM.EPOCHS=1", "OPTIM.LR=0.1", "DATALOADER.WORKERS=0")
    succeeds("train", *words, "--output_dir", folder)
    return folder


def pytest_collection_modifyitems(items):
    """A copy of the package without the task of detection passes all other tests."""
    for item in items:
        if "detection" not in TASKS and item.get_closest_marker("detection"):
            item.add_marker(pytest.mark.skip(reason="needs vil/tasks/detection"))
