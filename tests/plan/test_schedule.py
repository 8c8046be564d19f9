"""Schedules are exact, never rise, start at full depth and reject bad values."""

import decimal
import json
import math
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from depthdecay.argument_checks import exact_decimal, whole_number
from depthdecay.errors import DepthDecayError
from depthdecay.plan.schedule import (
    ConstantSchedule,
    FullSchedule,
    LinearSchedule,
    PowerSchedule,
    Schedule,
    schedule_from_dict,
    solve_alpha,
)

alphas = st.one_of(
    st.integers(1, 1000).map(lambda n: str(Decimal(n) / 1000)),
    st.sampled_from(["0.5", "0.25", "0.2", "0.75", "0.1", "0.125", "0.8"]),
    st.floats(1e-6, 1, allow_subnormal=False),
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    num_layers = draw(st.integers(1, 128))
    depth = st.integers(1, num_layers)
    kind = draw(st.sampled_from(["power", "linear", "constant", "full"]))
    if kind == "power":
        horizon = draw(st.none() | st.integers(1, 80))
        return PowerSchedule(num_layers, draw(alphas), draw(st.integers(0, 30)), draw(depth), horizon)
    if kind == "linear":
        start = draw(depth)
        return LinearSchedule(num_layers, start, draw(st.integers(1, start)), draw(st.integers(1, 80)))
    if kind == "constant":
        return ConstantSchedule(num_layers, draw(depth))
    return FullSchedule(num_layers)


def naive_power(num_layers, alpha, warmup_tokens, min_layers, horizon, n):
    base = Fraction(alpha if isinstance(alpha, str) else repr(alpha))
    table, factor = [], Fraction(1)
    for i in range(n):
        if horizon is not None and i >= horizon:
            table.append(table[-1])
            continue
        if i > warmup_tokens:
            factor *= base
        table.append(min(num_layers, max(min_layers, math.floor(num_layers * factor))))
    return tuple(table)


@pytest.mark.parametrize(
    ("schedule", "table"),
    [
        (PowerSchedule(30, 0.99), (30, 29, 29, 29, 28, 28, 28, 27)),
        (PowerSchedule(100, 0.7), (100, 70, 49, 34, 24)),
        (PowerSchedule(8, 0.5), (8, 4, 2, 1, 1)),
        (PowerSchedule(1000, 0.1), (1000, 100, 10, 1, 1)),
        (PowerSchedule(8, 0.5, warmup_tokens=2), (8, 8, 8, 4, 2)),
        (PowerSchedule(8, 0.5, min_layers=3), (8, 4, 3, 3, 3)),
        (PowerSchedule(8, 0.5, horizon=2), (8, 4, 4, 4, 4)),
        (PowerSchedule(8, 0.5, horizon=1), (8, 8, 8, 8, 8)),
        (PowerSchedule(8, 1), (8, 8, 8, 8, 8)),
        (LinearSchedule(10, 10, 6, 5), (10, 9, 8, 7, 6, 6, 6)),
        (LinearSchedule(10, 10, 8, 5), (10, 9, 9, 8, 8, 8)),
        (LinearSchedule(10, 8, 6, 5), (10, 7, 7, 6, 6, 6)),
        (LinearSchedule(10, 7, 5, 1), (10, 5, 5)),
        (ConstantSchedule(6, 4), (6, 4, 4, 4)),
        (FullSchedule(6), (6, 6, 6)),
    ],
)
def test_tables(schedule, table):
    assert schedule.table(len(table)) == table
    assert tuple(schedule.depth(i) for i in range(len(table))) == table


@pytest.mark.parametrize("alpha", [0.7, "0.7", Decimal("0.70"), " 0.7 "])
def test_alpha_means_its_shortest_decimal(alpha):
    assert int(100 * 0.7**2) == 48
    assert PowerSchedule(100, alpha).depth(2) == 49
    assert PowerSchedule(100, alpha) == PowerSchedule(100, 0.7)


@settings(max_examples=200)
@given(st.integers(1, 128), alphas, st.integers(0, 20), st.integers(1, 128), st.none() | st.integers(1, 70))
@example(128, "0.5", 0, 1, None)
@example(100, "0.1", 0, 1, None)
@example(125, "0.8", 0, 1, None)
def test_power_equals_the_rule_walked_token_by_token(num_layers, alpha, warmup, min_layers, horizon):
    min_layers = min(min_layers, num_layers)
    schedule = PowerSchedule(num_layers, alpha, warmup, min_layers, horizon)
    assert schedule.table(60) == naive_power(num_layers, alpha, warmup, min_layers, horizon, 60)


@settings(max_examples=150)
@given(schedules(), st.integers(1, 150))
def test_every_schedule_keeps_the_contract(schedule, n):
    table = schedule.table(n)
    assert table[0] == schedule.num_layers
    assert list(table) == sorted(table, reverse=True)
    assert all(schedule.final_depth <= depth <= schedule.num_layers for depth in table)
    assert schedule.layers_executed(n) == sum(table)
    assert schedule.mean_depth(n) == sum(table) / n
    assert schedule.visited_depths(n) == tuple(sorted(set(table), reverse=True))
    for depth in (1, schedule.final_depth, schedule.num_layers):
        assert schedule.tokens_at_least(depth, n) == sum(d >= depth for d in table)
    assert schedule.depth(10**15) == schedule.depth(10**16)
    assert schedule_from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule


@pytest.mark.parametrize("alpha", ["0.999999", "0.9999999999", "0." + "9" * 40])
def test_slow_decay_is_exact_at_its_falls_without_walking_there(alpha):
    schedule = PowerSchedule(80, alpha, min_layers=70)
    for depth in range(79, 70, -1):
        # Found by bisecting depth() itself, then checked with logarithms at a separate precision.
        low, high = 0, 10**45
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if schedule.depth(middle) <= depth else (middle, high)
        with decimal.localcontext(prec=200):
            crossing = (Decimal(80) / Decimal(depth + 1)).ln() / -Decimal(alpha).ln()
            assert high - 1 <= crossing < high or (depth == 79 and high == 1)


def test_slow_decay_agrees_with_exact_powers():
    schedule = PowerSchedule(80, "0.9999")
    first = next(i for i in range(10_000) if schedule.depth(i) == 60)
    alpha = Fraction("0.9999")
    assert 80 * alpha**first < 61 <= 80 * alpha ** (first - 1)


def test_nothing_executed_for_no_tokens():
    assert PowerSchedule(8, 0.5).table(0) == ()
    assert PowerSchedule(8, 0.5).layers_executed(0) == 0
    with pytest.raises(DepthDecayError):
        PowerSchedule(8, 0.5).mean_depth(0)


BAD_ALPHAS = [0, 0.0, -0.5, 1.0001, 2, math.nan, math.inf, "x", "", "nan", None, True, [0.5], b"0.5", "1e-5000"]


@pytest.mark.parametrize("alpha", BAD_ALPHAS)
def test_bad_alpha_is_refused(alpha):
    with pytest.raises(DepthDecayError, match="alpha"):
        PowerSchedule(30, alpha)


@pytest.mark.parametrize(
    "build",
    [
        lambda: FullSchedule(0),
        lambda: FullSchedule(True),
        lambda: FullSchedule(10**12),
        lambda: FullSchedule("30"),
        lambda: FullSchedule(30.0),
        lambda: PowerSchedule(30, 0.9, warmup_tokens=-1),
        lambda: PowerSchedule(30, 0.9, warmup_tokens=1.5),
        lambda: PowerSchedule(30, 0.9, min_layers=0),
        lambda: PowerSchedule(30, 0.9, min_layers=31),
        lambda: PowerSchedule(30, 0.9, horizon=0),
        lambda: PowerSchedule(30, 0.9, horizon=False),
        lambda: LinearSchedule(30, 31, 10, 10),
        lambda: LinearSchedule(30, 20, 21, 10),
        lambda: LinearSchedule(30, 20, 0, 10),
        lambda: LinearSchedule(30, 20, 10, 0),
        lambda: ConstantSchedule(30, 0),
        lambda: ConstantSchedule(30, 31),
        lambda: FullSchedule(30).depth(-1),
        lambda: FullSchedule(30).depth(1.0),
        lambda: FullSchedule(30).table(-1),
        lambda: FullSchedule(30).layers_executed(-1),
    ],
)
def test_bad_values_are_refused_on_one_line(build):
    with pytest.raises(DepthDecayError) as caught:
        build()
    assert "\n" not in str(caught.value)
    assert "expected" in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {},
        {"kind": "cubic", "num_layers": 3},
        {"kind": ["power"], "num_layers": 3},
        {"kind": "power", "num_layers": 3},
        {"kind": "full", "num_layers": 3, "alpha": 0.5},
        {"kind": "full", "num_layers": "3"},
    ],
)
def test_bad_dicts_are_refused(values):
    with pytest.raises(DepthDecayError):
        schedule_from_dict(values)


def test_index_types_become_plain_ints():
    class Index:
        def __index__(self) -> int:
            return 7

    assert type(whole_number("x", Index(), 0)) is int
    assert type(FullSchedule(Index()).num_layers) is int


def test_schedules_are_frozen_and_hashable():
    schedule = PowerSchedule(30, 0.99)
    with pytest.raises(AttributeError):
        schedule.alpha = 0.5
    assert len({schedule, PowerSchedule(30, "0.990")}) == 1


@settings(max_examples=60)
@given(
    st.integers(2, 60),
    st.decimals(1, 4, places=3),
    st.integers(1, 200),
    st.integers(0, 10),
    st.integers(1, 8),
)
def test_solved_alpha_reaches_the_speedup_and_is_the_closest(num_layers, speedup, over_tokens, warmup, min_layers):
    min_layers = min(min_layers, num_layers)

    def executed(alpha):
        return PowerSchedule(num_layers, alpha, warmup, min_layers).layers_executed(over_tokens)

    budget = Fraction(num_layers * over_tokens) / Fraction(speedup)
    try:
        alpha = solve_alpha(num_layers, speedup, over_tokens, warmup, min_layers)
    except DepthDecayError:
        assert executed("1e-9") > budget
        return
    found = executed(alpha)
    assert found <= budget
    # The next step of the finest grid that changes anything overshoots, so nothing is in between.
    low, high = int(alpha * 10**8), 10**8
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if executed(Decimal(middle).scaleb(-8)) == found else (low, middle - 1)
    assert low == 10**8 or executed(Decimal(low + 1).scaleb(-8)) > budget


def test_solved_alpha_is_short():
    assert solve_alpha(30, 1, 256, 0, 4) == 1
    alpha = solve_alpha(28, 1.25, 256, 0, 4)
    table = PowerSchedule(28, alpha).table(256)
    places = -alpha.as_tuple().exponent
    assert places <= 8
    shorter = Decimal(int(alpha * 10 ** (places - 1))).scaleb(1 - places)
    assert PowerSchedule(28, shorter).table(256) != table


@pytest.mark.parametrize("speedup", [0.99, 0, -1, math.nan, math.inf, "fast", None, True])
def test_bad_speedups_are_refused(speedup):
    with pytest.raises(DepthDecayError, match="speedup"):
        solve_alpha(30, speedup, 256, 0, 4)


def test_unreachable_speedup_names_the_largest_which_can_be_asked_for():
    with pytest.raises(DepthDecayError, match=r"largest reachable is (\S+)$") as caught:
        solve_alpha(30, 7.5, 256, 3, 4)
    largest = str(caught.value).rsplit(" ", 1)[1]
    assert 6.5 < float(largest) < 7.5
    solve_alpha(30, largest, 256, 3, 4)
    with pytest.raises(DepthDecayError):
        solve_alpha(30, str(Decimal(largest) + Decimal("0.001")), 256, 3, 4)


def test_exact_decimal_keeps_all_digits():
    digits = "0." + "123456789" * 8
    assert format(exact_decimal("x", digits), "f") == digits


def test_pure_modules_do_not_import_torch():
    code = (
        "import sys\n"
        "from depthdecay.plan import baselines, ladder, plan, schedule\n"
        "sys.exit(', '.join({'torch', 'transformers', 'huggingface_hub', 'numpy'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
