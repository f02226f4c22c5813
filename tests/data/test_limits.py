"""The limit of open files is raised for the workers of all loaders."""

import os
import resource

import pytest

from vil.data.build import check_open_files

pytestmark = pytest.mark.smoke


@pytest.fixture
def soft_limit():
    """Sets the soft limit, and keeps the process's own after the test."""
    own = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, own[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, own)


def test_the_idle_workers_of_evaluated_sets_count(soft_limit):
    now = len(os.listdir("/dev/fd"))
    soft_limit(now + 50)
    check_open_files(8, 5)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= now + 8 * (8 + 8 + 4 * 4.25)  # measured
