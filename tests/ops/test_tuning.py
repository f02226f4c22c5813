"""The tuner checks every candidate, takes the fastest, and survives its own file."""

import json
import logging
import os
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.common.backends import restored_backends
from vil.ops import (
    BACKENDS,
    Case,
    LocalBias,
    Window,
    choose,
    explain,
    local_attention,
    register_backend,
)
from vil.ops.dispatch import CHOICES
from vil.ops.testing import make_inputs, run
from vil.ops.tuning import tuner, tuning_cache
from vil.utils.memory import reckoned
from vil.utils.timing import peak_tensor_bytes

CASE = Case(Window((9, 7), 3), 2, 2, 8, num_global=1, table_bias=True, global_bias=True)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_tables(monkeypatch, tmp_path):
    monkeypatch.setenv("VIL_CACHE", str(tmp_path))
    CHOICES.clear()
    with restored_backends():
        yield
    CHOICES.clear()


class Slope(torch.autograd.Function):
    """The same number, with a gradient that is off by a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def right(q, k, v, window, **rest):
    return BACKENDS["chunk_autograd"].attend(q, k, v, window, **rest)


def biased(q, k, v, window, *, bias, **rest):
    table = Slope.apply(bias.table, 1.01)
    return right(q, k, v, window, bias=LocalBias(table, bias.to_global), **rest)


def globally_biased(q, k, v, window, *, bias, **rest):
    first = Slope.apply(bias.to_global, 0.99)
    return right(q, k, v, window, bias=LocalBias(bias.table, first), **rest)


def a_thousandth_off(q, k, v, window, **rest):
    return right(q, k, v, window, **rest) * 1.001


def right_in_small(q, k, v, window, **rest):
    return right(q, k, v, window, **rest) * (2.0 if window.length > 80 else 1.0)


def not_a_number(q, k, v, window, **rest):
    return right(q, k, v, window, **rest) / 0.0


def raising(q, k, v, window, **rest):
    raise RuntimeError("no kernel image\nis available")


def too_large(q, k, v, window, **rest):
    if len(q) > tuner.TWO_IMAGES:  # so that the checks go well
        raise MemoryError("no room")
    return right(q, k, v, window, **rest)


def dropped(q, k, v, window, **rest):
    return right(q.detach(), k, v, window, **rest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("attend", "complaint"),
    [
        (biased, "wrong: grad of table is off by 1.0e-02"),
        (globally_biased, "wrong: grad of to_global is off by"),
        (a_thousandth_off, "wrong: out is off by"),
        (not_a_number, "wrong: out is off by inf"),
        (dropped, "wrong: grad of q is off by 1.0e+00"),
        (raising, "failed: RuntimeError: no kernel image"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_candidate_is_caught_and_named(attend, complaint, dtype):
    register_backend("mine", attend)
    trials = tuner.tune(replace(CASE, dtype=dtype), ["mine", "chunk_handgrad"], rounds=1)
    assert [trial.name for trial in trials] == ["chunk_handgrad", "mine"]
    assert trials[1].reason.startswith(complaint)
    assert choose(replace(CASE, dtype=dtype)) == "chunk_handgrad"


def test_one_that_fails_when_it_is_timed_is_out_with_its_reason():
    register_backend("mine", too_large)
    many = replace(CASE, batch=3)
    trials = tuner.tune(many, ["mine", "masked"], rounds=1)
    assert [trial.name for trial in trials] == ["masked", "mine"]
    assert trials[1].reason == "failed: MemoryError: no room"
    assert choose(many) == "masked"


def test_what_is_wrong_on_the_whole_grid_only_is_caught_too():
    register_backend("mine", right_in_small)
    large = replace(CASE, window=Window((16, 16), 3))
    (trial,) = tuner.tune(large, ["mine"], rounds=1)
    assert trial.reason.startswith("wrong on the whole grid: out is off chunk_autograd's by 1.0")
    assert choose(large) == "blocked"


def test_a_right_one_of_your_own_is_measured_and_may_be_chosen():
    register_backend("mine", right, about="as an example")
    (trial,) = tuner.tune(CASE, ["mine"], rounds=2)
    assert (trial.name, trial.reason) == ("mine", "")
    assert min(trial.forward, trial.backward, trial.bytes) > 0
    assert choose(CASE) == "mine"
    assert explain(CASE)["mine"] == "chosen, tuned"
    assert choose(replace(CASE, head_dim=16)) == "masked", "another bucket is not tuned"


class Called:
    """An object as a backend."""

    def __call__(self, q, k, v, window, **rest):
        return right(q, k, v, window, **rest)


def test_the_code_of_any_backend_is_part_of_the_key():
    before = tuning_cache.fingerprint()
    register_backend("partial", partial(partial(right)))
    register_backend("object", Called())
    assert tuning_cache.fingerprint() != before, "this file is part of it now"


def test_checks_multiply_exactly_whatever_the_user_set():
    seen = []

    def watching(q, k, v, window, **rest):
        seen.append(torch.get_float32_matmul_precision())
        return right(q, k, v, window, **rest)

    register_backend("mine", watching)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    tuner.tune(CASE, ["mine"], rounds=1)
    assert {"highest", "high"} == set(seen), "checked exactly, timed as the user computes"
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision(before)


def test_devices_that_are_not_measured_are_refused():
    with pytest.raises(ValueError, match="unknown device to measure on 'mps'"):
        tuner.tune(replace(CASE, device="mps"), ["blocked"])


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="there is already a backend 'masked'"):
        register_backend("masked", right)


def test_every_backend_is_tried_and_the_unable_give_their_reasons():
    trials = tuner.tune(CASE, rounds=1)
    assert {trial.name for trial in trials} == set(BACKENDS)
    able = [trial for trial in trials if not trial.reason]
    assert trials[: len(able)] == able
    assert able == sorted(able, key=lambda trial: trial.seconds)
    assert "exact one only" in next(t.reason for t in trials if t.name == "unfold_nnf")


def test_an_unknown_candidate_is_refused_before_any_work():
    with pytest.raises(ValueError, match="unknown backend 'blokked'; did you mean 'blocked'"):
        tuner.tune(CASE, ["masked", "blokked"])
    assert not CHOICES


def test_too_many_bytes_are_a_reason():
    trials = tuner.tune(CASE, ["masked", "blocked"], rounds=1, most_bytes=1000)
    assert all(trial.reason.startswith("would hold") for trial in trials)
    assert not CHOICES


def test_in_evaluation_a_pair_is_its_forward():
    reasons = BACKENDS["blocked+triton"].unsupported(replace(CASE, needs_grad=False))
    assert reasons == ["without gradients the backend blocked does the same"]


def test_in_evaluation_only_the_forward_pass_counts():
    (trial,) = tuner.tune(replace(CASE, needs_grad=False), ["blocked"], rounds=1)
    assert trial.forward > 0
    assert trial.backward == 0
    with torch.no_grad():
        assert choose(replace(CASE, needs_grad=False)) == "blocked"
    assert list(CHOICES) == [replace(CASE, needs_grad=False).bucket()]


def test_the_choice_is_what_attention_takes(monkeypatch):
    taken = []
    register_backend("mine", lambda *args, **rest: taken.append(1) or right(*args, **rest))
    CHOICES[CASE.bucket()] = "mine"
    inputs = make_inputs(CASE)
    bias = LocalBias(inputs.table, inputs.to_global)
    local_attention(inputs.q, inputs.k, inputs.v, CASE.window, num_global=1, bias=bias)
    assert taken == [1]
    with torch.no_grad():  # evaluation is another bucket
        local_attention(inputs.q, inputs.k, inputs.v, CASE.window, num_global=1, bias=bias)
    assert taken == [1]


def test_a_choice_that_cannot_run_or_is_gone_is_not_taken():
    CHOICES[CASE.bucket()] = "unfold_nnf"
    assert choose(CASE) == "masked"
    CHOICES[CASE.bucket()] = "of_yesterday"
    assert choose(CASE) == "masked"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"batch": 1}, False),
        ({"batch": 3}, False),
        ({"head_dim": 16}, False),
        ({"needs_grad": False}, False),
        ({"table_bias": False}, False),
        ({"dtype": torch.bfloat16}, False),
        ({"window": Window((9, 9), 3)}, True),  # chunks count, not tokens
        ({"window": Window((10, 7), 3)}, False),
        ({"window": Window((9, 7), 3, 1)}, False),
    ],
    ids=str,
)
def test_what_shares_a_choice(change, same):
    assert (replace(CASE, **change).bucket() == CASE.bucket()) == same


def test_large_sizes_share_a_choice_by_powers_of_two_and_neighbours_share_one():
    def bucket(side, batch, mode=0):
        return replace(
            CASE, window=Window.from_mode((side, side), 3, 0, mode), batch=batch
        ).bucket()

    assert bucket(90, 500) == bucket(61, 64) == bucket(96, 10**6)
    assert bucket(90, 64) != bucket(99, 64)
    assert len({bucket(90, 64, mode) for mode in range(1, 9)}) == 1
    assert len({bucket(90, 64, mode) for mode in (-1, 0, 1)}) == 3


@pytest.mark.parametrize("name", ["masked", "chunk_autograd", "chunk_handgrad"])
def test_what_would_be_held_is_reckoned_without_computing(name):
    case = replace(CASE, window=Window((24, 20), 4), head_dim=32)
    with reckoned() as held:
        inputs = make_inputs(case)
        before = held.now
        run(BACKENDS[name].attend, case, inputs)
    inputs = make_inputs(case)
    measured = peak_tensor_bytes(lambda: run(BACKENDS[name].attend, case, inputs), CPU)
    assert held.peak - before == pytest.approx(measured, rel=0.05)


def test_choices_come_back_from_the_file():
    trials = tuner.tune(CASE, ["blocked", "masked"], rounds=1)
    assert tuning_cache.save("cpu", {CASE.bucket(): trials})
    other = replace(CASE, head_dim=16)
    assert tuning_cache.save("cpu", {other.bucket(): [tuner.Trial("gathered", forward=1.0)]})
    kept = dict(CHOICES)
    CHOICES.clear()
    assert tuning_cache.load("cpu") == 2
    assert {**kept, other.bucket(): "gathered"} == CHOICES


def test_choices_of_another_machine_or_code_are_left_alone(caplog):
    theirs = {"cpu of another kind": {CASE.bucket(): {"backend": "masked"}}}
    tuning_cache.path().write_text(json.dumps({"format": 1, "machines": theirs}))
    assert tuning_cache.load("cpu") == 0
    assert "has choices, but none of this machine" in caplog.text
    tuning_cache.save("cpu", {CASE.bucket(): [tuner.Trial("blocked", forward=1.0)]})
    found = json.loads(tuning_cache.path().read_text())["machines"]
    assert found.items() > theirs.items()
    assert len(found) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '"blocked"',
        '{"format": 2, "machines": {}}',
        '{"format": 1}',
        '{"format": 1, "machines": {"x": []}}',
        '{"format": 1, "machines": {"x": {"y": {"backend": 3}}}}',
        "\x00\x01",
    ],
)
def test_a_file_that_is_not_ours_is_a_warning(text, caplog):
    tuning_cache.path().write_text(text)
    assert tuning_cache.load("cpu") == 0
    assert "is ignored" in caplog.text
    assert tuning_cache.save("cpu", {CASE.bucket(): [tuner.Trial("blocked", forward=1.0)]})
    assert tuning_cache.load("cpu") == 1


def test_a_place_that_cannot_be_written_is_a_warning(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("VIL_CACHE", str(tmp_path / "file" / "below"))
    with caplog.at_level(logging.WARNING):
        trial = tuner.Trial("blocked", forward=1.0)
        assert not tuning_cache.save("cpu", {CASE.bucket(): [trial]})
    assert "could not be kept" in caplog.text
    assert tuning_cache.load("cpu") == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_folder_is_a_warning(tmp_path, caplog):
    tmp_path.chmod(0o500)
    assert not tuning_cache.save("cpu", {CASE.bucket(): [tuner.Trial("blocked", forward=1.0)]})
    assert "could not be kept" in caplog.text
