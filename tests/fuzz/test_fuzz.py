"""Changed files and command lines of every kind: one line, a known exit code, and nothing else.

Seeds of earlier failures are in failures.json, which the default tests repeat. `long` spends half a
minute on new cases, and VIL_FUZZ_CASES asks `slow` for a number of them.
"""

import itertools
import json
import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.common.fuzz.fork_server import ForkServer, run_process
from tests.common.fuzz.mutations import Change
from tests.common.fuzz.targets import TARGETS, run_case, write_inputs
from tests.common.marks import cases
from tests.common.native_cache import cache_with_library
from tests.common.small_runs import environment

pytestmark = pytest.mark.trust(11)
FAILURES = json.loads(Path(__file__).with_name("failures.json").read_text())
NUMBER = st.integers(0, 1 << 20)
CHANGES = st.lists(st.builds(Change, NUMBER, NUMBER, NUMBER, NUMBER), min_size=1, max_size=3)
CASES = st.tuples(st.sampled_from(sorted(TARGETS)), CHANGES)
ASKED = int(os.environ.get("VIL_FUZZ_CASES", "100"))
SEED = int(os.environ.get("VIL_FUZZ_SEED", "0"))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("fuzz") / "inputs")


@pytest.fixture(scope="module")
def environ(inputs):
    """Homes and caches of their own, which a case may write to."""
    home = inputs.parent / "home"
    home.mkdir()
    cache = cache_with_library(home / "cache")
    return environment(HOME=str(home), VIL_CACHE=cache, TMPDIR=str(home))


@pytest.fixture(scope="module")
def server(environ):
    server = ForkServer(environ)
    yield server
    server.close()


def fuzz(inputs, run, first_seed, *, cases=sys.maxsize, seconds=float("inf")):
    """Run new cases until their number or the time is reached. Returns how many ran; fails if one
    of them does, with the line for failures.json."""
    end, ran = time.monotonic() + seconds, 0

    def check(case):
        nonlocal ran
        ran += 1
        found = run_case(*case, inputs, inputs.parent / f"case{ran}", run)
        assert not found, f"{json.dumps(case)}\n{found}"

    batches = itertools.count()
    while ran < cases and time.monotonic() < end:  # hypothesis stops after a number of cases only
        seed(f"{first_seed} {next(batches)}")(
            settings(
                max_examples=min(20, cases - ran), deadline=None, database=None,
                phases=[Phase.generate], suppress_health_check=list(HealthCheck),
            )(given(CASES)(check))
        )()  # fmt: skip
    return ran


@pytest.mark.long
@pytest.mark.parametrize(
    "case", cases(FAILURES, [c for c in FAILURES if c[0] == "tar"]), ids=lambda case: case[0]
)
def test_earlier_failures(case, inputs, server, tmp_path):
    name, changes = case
    if name not in TARGETS:
        pytest.skip("needs vil/tasks/detection")
    changes = [Change(*numbers) for numbers in changes]
    assert not run_case(name, changes, inputs, tmp_path / "case", server.run)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_target_works_unchanged(name, inputs, server, tmp_path):
    """Else all its cases would end at the same error."""
    if TARGETS[name].words == ("config",):
        return
    outcomes = []

    def run(words, folder):
        outcomes.append(server.run(words, folder))
        return outcomes[-1]

    assert not run_case(name, [], inputs, tmp_path / "case", run)
    assert outcomes[0].code == 0, outcomes[0].err


@pytest.mark.long
def test_half_a_minute_of_new_cases(inputs, server):
    assert fuzz(inputs, server.run, SEED, cases=400, seconds=30) >= 10


@pytest.mark.slow
def test_as_many_cases_as_asked_for(inputs, server):
    assert fuzz(inputs, server.run, SEED, cases=ASKED) == ASKED


@pytest.mark.slow
def test_real_processes(inputs, environ):
    def run(words, folder):
        return run_process(words, folder, environ)

    assert fuzz(inputs, run, SEED, cases=ASKED) == ASKED
