"""The wheel works away from the repository: configs inside, a command, an epoch of digits."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common.native_cache import needs_compiler
from vil.data.datasets.digits import read_demo_digits
from vil.ops.native import build, library

pytestmark = pytest.mark.slow  # .ci/run installs the wheel too

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def build_wheel(folder: Path, **environment: str) -> Path:
    """Build the wheel of a copy of the sources. Returns its path."""
    for name in ("vil", "configs"):  # a copy: building leaves a folder behind that would be reused
        shutil.copytree(ROOT / name, folder / "source" / name)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    source = str(folder / "source")
    subprocess.run([*PIP, *build, source], check=True, env=os.environ | environment)
    (wheel,) = folder.glob("vil-*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The wheel in a folder of its own; what it depends on is found where it always is."""
    folder = tmp_path_factory.mktemp("wheel")
    install = ["install", "--no-deps", "--target", str(folder / "site"), build_wheel(folder)]
    subprocess.run([*PIP, *install], check=True)
    return folder / "site"


@needs_compiler
def test_it_has_the_native_library(installed):
    files = installed.glob("vil/ops/native/built/*.so")
    assert {file.stem for file in files} == set(build.INSTRUCTION_SETS)
    shown = subprocess.run(
        [sys.executable, "-m", "vil", "info", "DEVICE", "cpu"], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(installed), "VIL_CACHE": "none"}, check=True,
        cwd=installed,
    ).stdout  # fmt: skip
    assert f"native library: {library.instruction_sets()[0]}, from the package" in shown


def test_it_is_built_without_a_compiler(tmp_path):
    assert build_wheel(tmp_path, CXX="none-such").name.endswith("-py3-none-any.whl")


def test_it_trains_from_an_empty_folder(installed, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(installed)}
    options = ["OPTIM.EPOCHS=1", "SOLVER.WARMUP_EPOCHS=0", "INPUT.IMAGE_SIZE=32"]
    train = ["train", "--config-file", "digits/vil_nano.yaml", "--output_dir", "run", *options]
    for words in (train, ["evaluate", "--run", "run"]):
        done = subprocess.run(
            [sys.executable, "-m", "vil", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    assert "val set digits" in done.stdout
    where = "import vil, vil.config.yaml_source as s; print(vil.__file__, s.packaged_root())"
    shown = subprocess.run(
        [sys.executable, "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert all(path.startswith(str(installed)) for path in shown.stdout.split())


def test_it_holds_every_config_and_the_licence(installed):
    for path in (ROOT / "configs").rglob("*.yaml"):
        assert (installed / "vil/configs" / path.relative_to(ROOT / "configs")).exists(), path
    assert list(installed.glob("vil-*.dist-info/**/LICENSE"))
    assert not (installed / "tests").exists()


def test_it_predicts_in_an_empty_folder_without_a_run_or_a_network(installed, tmp_path):
    pictures, classes = read_demo_digits()
    (tmp_path / "photo.png").write_bytes(pictures[200].content)
    environment = os.environ | {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else []
    if unshare and subprocess.run([*unshare, "true"], capture_output=True).returncode:
        unshare = []
    done = subprocess.run(
        [*unshare, sys.executable, "-m", "vil", "predict", "photo.png", "--top", "1"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split()[:2] == ["photo.png", classes[200]]
    assert str(installed) in done.stderr  # whose weights these are


def test_an_editable_installation_is_found_from_every_folder(tmp_path):
    """Also from the folder that contains a checkout named vil, which looks like a package."""
    source, site = tmp_path / "vil", tmp_path / "site"
    for name in ("vil", "configs"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = (
        "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True)
    (wheel,) = tmp_path.glob("vil-*.whl")
    shutil.unpack_archive(wheel, site, "zip")
    show = f"import site; site.addsitedir({str(site)!r}); import vil; print(vil.__file__)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", show], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(source / "vil/__init__.py"), done.stderr
