"""Every baseline rule meets the same layer budget, as closely as whole depths allow."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthdecay.errors import DepthDecayError
from depthdecay.plan.baselines import PEER_RULES, plan_for_budget
from depthdecay.plan.plan import Plan

SCORES = [0.5, 0.1, 0.2, 0.4] * 7


def test_peer_ladders_drop_where_the_papers_say():
    assert Plan.early_exit(10, 6).layers(6) == (0, 1, 2, 3, 4, 5)
    assert Plan.skipdecode(10, 4, 20, core_head=2).layers(4) == (0, 1, 8, 9)
    assert Plan.unified(9, 5).layers(5) == (0, 2, 4, 6, 8)
    assert Plan.constant(10, 7).layers(7) == (0, 1, 2, 6, 7, 8, 9)
    assert Plan.shortgpt([0.5, 0.1, 0.9, 0.2], 2).layers(2) == (0, 2)
    assert Plan.skipdecode(10, 4, 7).depths(9) == (10, 9, 8, 7, 6, 5, 4, 4, 4)


@pytest.mark.parametrize("rule", PEER_RULES)
@pytest.mark.parametrize("speedup", [1, 1.1, 1.33, 1.6])
def test_rules_meet_the_budget(rule, speedup):
    plan = plan_for_budget(rule, 28, speedup, 256, scores=SCORES)
    achieved = plan.layer_speedup(256)
    assert plan.notes == {"asked_layer_speedup": speedup, "over_tokens": 256, "layer_speedup": achieved}
    if rule == "full":
        assert achieved == 1
    else:
        # Whole depths: off by at most half a layer of mean depth.
        assert abs(28 / achieved - 28 / speedup) <= 0.5
    if rule in ("decay", "middle-out"):
        assert speedup <= achieved < speedup + 0.005


@settings(max_examples=40)
@given(
    st.sampled_from(["constant", "unified", "early-exit", "shortgpt"]),
    st.floats(1, 2.5),
    st.integers(1, 300),
)
def test_constant_rules_take_the_nearest_depth(rule, speedup, over_tokens):
    budget = 28 * over_tokens / speedup
    lowest = {"constant": 4, "unified": 2}.get(rule, 1)
    sums = [28 + depth * (over_tokens - 1) for depth in range(lowest, 29)]
    try:
        executed = plan_for_budget(rule, 28, speedup, over_tokens, scores=SCORES).layers_executed(over_tokens)
    except DepthDecayError:
        assert min(sums) > budget
        return
    assert abs(executed - budget) <= min(abs(each - budget) for each in sums) + 1e-6


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("router", 28, 1.2, 256), "expected one of full, decay"),
        (("shortgpt", 28, 1.2, 256), "needs 28 scores"),
        (("shortgpt", 28, 1.2, 256, [0.1] * 27), "given: 27"),
        (("constant", 28, 0.9, 256), "at least 1"),
        (("constant", 28, float("nan"), 256), "speedup"),
        (("constant", 28, 20, 256), "cannot be reached by the constant rule"),
        (("skipdecode", 28, 2.5, 256), "cannot be reached by the skipdecode rule"),
        (("unified", 28, 1.2, 0), "over_tokens"),
        (("unified", 0, 1.2, 10), "num_layers"),
        (("unified", 1, 1.2, 10), "num_layers"),
        (("skipdecode", 1, 1.2, 10), "core_head"),
        (("full", 28, "fast", 10), "speedup"),
    ],
)
def test_bad_input_is_refused(arguments, expected):
    with pytest.raises(DepthDecayError) as caught:
        plan_for_budget(*arguments)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
