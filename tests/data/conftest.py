"""One root with a small dataset of every format, for the tests of a file."""

import pytest

from tests.common.data_files import write_all_formats


@pytest.fixture(scope="module")  # ends with the tests: it patches checksums of torchvision
def everything(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield write_all_formats(tmp_path_factory.mktemp("everything"), monkeypatch)
