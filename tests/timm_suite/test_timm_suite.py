"""timm's own tests of models, from its source distribution, for vil's names.

The test file is unchanged except for what its authors would add for new models: vil's module among
those with forward_intermediates, and vil_nano among those whose features are tokens.
Not run: torch.jit.script and torch.fx.symbolic_trace, which torch.compile and torch.export
supersede and which cannot select a backend by tensor sizes; and test_model_load_pretrained for
the published weights, whose host is offline.
"""

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import timm

from vil.models.registry import ARCHS

pytestmark = pytest.mark.timm
TESTS = {
    "test_model_forward": ARCHS,
    "test_model_backward": ARCHS,
    "test_model_default_cfgs": [name for name in ARCHS if name != "vil_nano"],
    "test_model_default_cfgs_non_std": ["vil_nano"],
    "test_model_forward_features": [name for name in ARCHS if name != "vil_nano"],
    "test_model_forward_intermediates_features": ARCHS,
    "test_model_forward_intermediates": ARCHS,
    "test_prune_intermediate_layers_contract": ARCHS,
    "test_model_load_pretrained": ["vil_nano"],
}
ADDED = {"FEAT_INTER_FILTERS = [": "'timm_register', ", "NON_STD_FILTERS = [": "'vil_nano*', "}
REGISTER = "import vil.integrations.timm_register\n"


@pytest.fixture(scope="module")
def suite(tmp_path_factory) -> Path:
    """A folder with the test file of the installed timm, and a pytest plugin that registers vil's
    models before collection."""
    folder = tmp_path_factory.mktemp("timm")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "timm"]
    done = subprocess.run([*pip, "--dest", folder, f"timm=={timm.__version__}"])
    if done.returncode:
        pytest.skip("timm's source distribution is not available")
    with tarfile.open(next(folder.glob("timm-*.tar.gz"))) as archive:
        inside = next(n for n in archive.getnames() if n.endswith("/tests/test_models.py"))
        text = archive.extractfile(inside).read().decode()
    for line, name in ADDED.items():
        assert text.count(line) == 1
        text = text.replace(line, line + name)
    (folder / "test_models.py").write_text(text)
    (folder / "register_vil.py").write_text(REGISTER)
    return folder


@pytest.fixture(scope="module")
def outcomes(suite) -> dict[str, dict[str, str]]:
    """{test: {its parameters: PASSED, FAILED or SKIPPED}}."""
    words = "vil_ and not torchscript and not fx and not (load_pretrained and not vil_nano)"
    words += " and not features_pretrained"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "register_vil", "-p", "no:cacheprovider",
         "-W", "ignore", "--no-header", "-n", "2", "test_models.py", "-k", words],
        cwd=suite, capture_output=True, text=True,
    )  # fmt: skip
    print(done.stdout[-6000:])
    found = {}
    for outcome, name, case in re.findall(
        r"(PASSED|FAILED|SKIPPED|ERROR) test_models\.py::(\w+)\[(.*)\]", done.stdout
    ):
        found.setdefault(name, {})[case] = outcome
    return found


@pytest.mark.parametrize("test", TESTS)
def test_each_name_passes(outcomes, test):
    found = {re.search(r"vil_\w+", case)[0]: outcome for case, outcome in outcomes[test].items()}
    assert set(outcomes[test].values()) == {"PASSED"}, outcomes[test]
    assert set(found) == set(TESTS[test])


def test_no_other_tests_ran(outcomes):
    assert set(outcomes) == set(TESTS)
