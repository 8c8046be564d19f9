"""Ladders are nested, keep their core and reject bad orders."""

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthdecay.errors import DepthDecayError
from depthdecay.plan.ladder import Ladder


@st.composite
def ladders(draw: st.DrawFn) -> Ladder:
    num_layers = draw(st.integers(2, 48))
    kind = draw(st.sampled_from(["middle_out", "from_top", "from_bottom", "evenly", "from_scores", "order"]))
    head = draw(st.integers(0, num_layers - 1))
    tail = draw(st.integers(0, num_layers - 1 - head))
    if kind == "middle_out":
        return Ladder.middle_out(num_layers, head, tail)
    if kind == "from_top":
        return Ladder.from_top(num_layers, head)
    if kind == "from_bottom":
        return Ladder.from_bottom(num_layers, head, tail)
    if kind == "evenly":
        return Ladder.evenly(num_layers, draw(st.integers(2, num_layers)))
    if kind == "from_scores":
        scores = st.lists(st.floats(-1, 1), min_size=num_layers, max_size=num_layers)
        return Ladder.from_scores(draw(scores), head, tail)
    order = draw(st.permutations(range(num_layers)))
    return Ladder(num_layers, tuple(order[: draw(st.integers(0, num_layers))]))


@settings(max_examples=150)
@given(ladders())
def test_ladders_are_nested(ladder):
    everything = set(range(ladder.num_layers))
    assert set(ladder.core) | set(ladder.flex) == everything
    assert not set(ladder.core) & set(ladder.flex)
    assert ladder.layers(ladder.num_layers) == tuple(range(ladder.num_layers))
    assert ladder.layers(ladder.min_layers) == ladder.core
    for depth in range(ladder.min_layers, ladder.num_layers + 1):
        kept = ladder.layers(depth)
        assert len(kept) == depth
        assert list(kept) == sorted(kept)
        assert set(kept) | set(ladder.dropped(depth)) == everything
        if depth > ladder.min_layers:
            assert set(ladder.layers(depth - 1)) < set(kept)
    for layer in everything:
        runs = [d for d in range(ladder.min_layers, ladder.num_layers + 1) if layer in ladder.layers(d)]
        assert ladder.least_depth(layer) == min(runs)
    assert Ladder.from_dict(json.loads(json.dumps(ladder.to_dict()))) == ladder
    for depth in (ladder.min_layers - 1, ladder.num_layers + 1):
        with pytest.raises(DepthDecayError):
            ladder.layers(depth)


@pytest.mark.parametrize(
    ("ladder", "order", "core"),
    [
        (Ladder.middle_out(8), (3, 4, 2, 5), (0, 1, 6, 7)),
        (Ladder.middle_out(9), (4, 3, 5, 2, 6), (0, 1, 7, 8)),
        (Ladder.middle_out(6, 3, 1), (3, 4), (0, 1, 2, 5)),
        (Ladder.from_top(5, 2), (4, 3, 2), (0, 1)),
        (Ladder.from_bottom(6, 1, 2), (1, 2, 3), (0, 4, 5)),
        (Ladder.from_scores([0.9, 0.1, 0.5, 0.1]), (1, 3, 2, 0), ()),
        (Ladder.from_scores([0.0, 0.3, 0.2, 0.1], 1, 1), (2, 1), (0, 3)),
        (Ladder.evenly(9, 3), (3, 5, 2, 6, 1, 7), (0, 4, 8)),
        (Ladder.evenly(4, 4), (), (0, 1, 2, 3)),
    ],
)
def test_orders(ladder, order, core):
    assert ladder.drop_order == order
    assert ladder.core == core
    assert ladder.min_layers == len(core)


@given(st.integers(2, 200), st.data())
def test_evenly_spreads_with_first_and_last(num_layers, data):
    depth = data.draw(st.integers(2, num_layers))
    kept = Ladder.evenly(num_layers, depth).layers(depth)
    assert (len(kept), kept[0], kept[-1]) == (depth, 0, num_layers - 1)
    gaps = [b - a for a, b in pairwise(kept)]
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(("head", "tail"), [(2, 2), (4, 0), (0, 4), (3, 9)])
def test_no_flex_layer_names_all_three(head, tail):
    with pytest.raises(DepthDecayError) as caught:
        Ladder.middle_out(4, head, tail)
    for part in (f"core_head {head}", f"core_tail {tail}", "4 layers"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Ladder(4, (1, 1)),
        lambda: Ladder(4, (4,)),
        lambda: Ladder(4, (-1,)),
        lambda: Ladder(4, (1.0,)),
        lambda: Ladder(4, (True,)),
        lambda: Ladder(4, "12"),
        lambda: Ladder(4, None),
        lambda: Ladder(0, ()),
        lambda: Ladder.middle_out(8, -1, 2),
        lambda: Ladder.middle_out(8, 2, 1.5),
        lambda: Ladder.evenly(8, 1),
        lambda: Ladder.evenly(8, 9),
        lambda: Ladder.from_scores([]),
        lambda: Ladder.from_scores([0.1, math.nan]),
        lambda: Ladder.from_scores([0.1, "0.2"]),
        lambda: Ladder.from_scores([0.1, None]),
        lambda: Ladder.from_dict({"num_layers": 4}),
        lambda: Ladder.from_dict([4, [1]]),
        lambda: Ladder.from_dict({"num_layers": 4, "drop_order": 1}),
        lambda: Ladder.from_dict({"num_layers": 4, "drop_order": [], "core": 1}),
        lambda: Ladder.middle_out(8).least_depth(8),
    ],
)
def test_bad_input_is_refused(build):
    with pytest.raises(DepthDecayError) as caught:
        build()
    assert "\n" not in str(caught.value)
