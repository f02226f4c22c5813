"""One root with a small dataset of every format, for all tests of this folder."""

import pytest

from tests.common.data_files import write_all_formats


@pytest.fixture(scope="package")  # ends with these tests: it patches checksums of torchvision
def everything(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield write_all_formats(tmp_path_factory.mktemp("everything"), monkeypatch)
