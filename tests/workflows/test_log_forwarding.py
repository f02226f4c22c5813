"""A warning is logged once per run and per command."""

import logging

import pytest

from vil.workflows.log_forwarding import forward_logs, log_warnings_once

pytestmark = pytest.mark.smoke
log = logging.getLogger("vil.some.module")


def test_a_warning_is_said_once_and_other_lines_each_time():
    said = []
    with forward_logs(True) as logs:
        log.warning("early")
        logs.open(said.append)
        for _ in range(2):
            log.warning("early")
            log.warning("late %s", 1)
            log.info("again")
    assert said == ["early", "late 1", "again", "again"]


def test_a_second_pass_over_a_config_is_silent(caplog):
    said = []
    with log_warnings_once():
        log.warning("same")
        with forward_logs(True) as logs:
            logs.open(said.append)
            log.warning("same")
            log.warning("other")
        log.warning("other")
    assert (caplog.messages, said) == (["same"], ["other"])
    log.warning("same")  # another command
    assert caplog.messages == ["same", "same"]
