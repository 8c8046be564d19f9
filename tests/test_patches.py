"""Patched objects are restored, also when several threads patch them at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_models import tiny_model

from depthdecay.cuda.decode_attention import attention_in_steps
from depthdecay.library_internals import attention_function
from depthdecay.model import grouped_attention as attention
from depthdecay.model.layers import LayerStack
from depthdecay.patches import SharedPatch, replaced_each


def test_a_shared_change_lasts_until_the_last_one_is_done() -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def change() -> Iterator[None]:
        events.append("made")
        yield
        events.append("undone")

    patch = SharedPatch(change)
    first, second = patch.made(), patch.made()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # not in stack order, as with threads
    assert events == ["made"]
    second.__exit__(None, None, None)
    assert events == ["made", "undone"]
    with patch.made():
        assert events == ["made", "undone", "made"]


def test_attributes_are_put_back_after_an_error() -> None:
    class Thing:
        pass

    has, has_not = Thing(), Thing()
    has.__dict__["name"] = 1
    seen = []

    def change() -> None:
        with replaced_each([has, has_not], "name", [2, 3]):
            seen.extend([dict(vars(has)), dict(vars(has_not))])
            raise ValueError

    with pytest.raises(ValueError):
        change()
    assert seen == [{"name": 2}, {"name": 3}]
    assert [vars(has), vars(has_not)] == [{"name": 1}, {}]


def test_two_models_in_two_threads_keep_their_own_attention() -> None:
    """One starts, the other starts, the first ends: the second keeps its own, and afterwards none is left."""
    original = attention_function("sdpa")
    stacks = [LayerStack.of(tiny_model()), LayerStack.of(tiny_model())]
    bystander = LayerStack.of(tiny_model()).attending[0]
    steps = [threading.Event() for _ in range(4)]
    seen: dict[str, Any] = {}

    def asked(module: Any) -> Any:
        return getattr(module, attention._MARK, None)

    def first() -> None:
        with attention_in_steps(stacks[0]):
            steps[0].set()
            assert steps[1].wait(10)
        steps[2].set()

    def second() -> None:
        assert steps[0].wait(10)
        with attention.grouped_attention(stacks[1]):
            steps[1].set()
            assert steps[2].wait(10)
            seen["own"], seen["other"] = asked(stacks[1].attending[0]), asked(stacks[0].attending[0])
            seen["bystander"], seen["dispatched"] = asked(bystander), attention_function("sdpa")

    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen["own"] is attention.grouped(original)  # type: ignore[arg-type]
    assert seen["other"] is None
    assert seen["bystander"] is None
    assert seen["dispatched"] is not original
    assert attention_function("sdpa") is original
