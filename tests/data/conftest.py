"""One root with a small dataset of every format, written once."""

import pytest

from tests.common.data_files import write_all_formats


@pytest.fixture(scope="session")
def everything(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield write_all_formats(tmp_path_factory.mktemp("everything"), monkeypatch)
