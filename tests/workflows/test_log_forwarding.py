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


def test_warnings_of_a_run_that_never_opened_its_log_are_kept(caplog):
    with forward_logs(True):
        log.warning("why")
        log.warning("why")
    assert caplog.messages == ["why"]


def test_dropped_records_do_not_count_as_logged(caplog):
    with log_warnings_once():
        with forward_logs(False):
            log.warning("repeated below")
        log.warning("repeated below")
    assert caplog.messages == ["repeated below"]


def test_other_packages_are_left_alone(caplog):
    with log_warnings_once():
        for _ in range(2):
            logging.getLogger("other").warning("theirs")
    assert caplog.messages == ["theirs", "theirs"]
