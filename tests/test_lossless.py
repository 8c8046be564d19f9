"""Lossless mode: the full model's answer, whatever was drafted."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, LAYERS, PROMPTS, tiny_model

import depthdecay as dd
from depthdecay.errors import DepthDecayError
from depthdecay.lossless import draft_depths, drafting_plan
from depthdecay.windows import Drafter, Drafting, Lookup, Pace, StepCosts, expected_tokens

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "seed": 5, "temperature": 0.7, "top_p": 0.9},
    "penalised": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
}


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Windows of changing length instead of those that pay: random weights draft badly."""
    lengths: list[int] = []

    def window(self: Drafter) -> int:
        lengths.append((1, 5, 3, 0, 7)[len(lengths) % 5])
        return lengths[-1]

    asked: list[float] = []

    def goes_on(self: Drafter, sure: float) -> bool:
        asked.append(sure)
        return len(asked) % 7 != 0

    monkeypatch.setattr(Drafter, "window", window)
    monkeypatch.setattr(Drafter, "goes_on", goes_on)
    return lengths


def token_ids(engine: dd.Engine, mode: str, prompts: list[list[int]], tokens: int, **settings: Any) -> list[list[int]]:
    return [result.token_ids for result in engine.generate(prompts, tokens, mode=mode, **settings)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_it_says_what_full_depth_says(architecture: str, settings: dict[str, Any], windows: list[int]) -> None:
    model = tiny_model(architecture)
    for order in ([3], [3, 4, 6, 1]):
        engine = dd.Engine(model, plan=dd.Plan.constant(LAYERS, LAYERS - len(order), drop_order=order))
        for prompts in (PROMPTS[:1], PROMPTS):
            expected = token_ids(engine, "full", prompts, 24, eos_token_id=None, **settings)
            assert token_ids(engine, "lossless", prompts, 24, eos_token_id=None, **settings) == expected
    assert windows


def test_texts_longer_than_a_sliding_window(windows: list[int]) -> None:
    for architecture in ("gemma3_text", "mistral", "gemma2"):
        engine = dd.Engine(tiny_model(architecture), plan=dd.Plan.constant(LAYERS, LAYERS - 1, drop_order=[4]))
        expected = token_ids(engine, "full", PROMPTS, 70, eos_token_id=None)
        assert token_ids(engine, "lossless", PROMPTS, 70, eos_token_id=None) == expected


def perfect_engine() -> dd.Engine:
    """Its shallow pass is the full one: layer 3 does nothing."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[3].self_attn.o_proj.weight.zero_()
        model.model.layers[3].mlp.down_proj.weight.zero_()
    return dd.Engine(model, plan=dd.Plan.constant(LAYERS, LAYERS - 1, drop_order=[3]))


def test_drafts_that_are_right_are_kept(windows: list[int]) -> None:
    engine = perfect_engine()
    (result,) = engine.generate([PROMPTS[0]], 40, mode="lossless", eos_token_id=None, lookup=False)
    assert result.acceptance == 1.0
    assert result.accepted == result.drafted > 20
    assert len(result.token_ids) == len(result.depths) == len(result.draft_depths) == 40
    assert set(result.depths) == {LAYERS}
    assert result.draft_depths.count(LAYERS - 1) == result.accepted
    assert result.draft_depths[0] is None
    # The prompt gives one token, every verification one more, every accepted draft another.
    assert 1 + result.verifications + result.accepted == 40
    assert result.layers_executed == (1 + result.verifications) * LAYERS + result.drafted * (LAYERS - 1)
    assert result.passes_per_token == pytest.approx(result.layers_executed / (40 * LAYERS))


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2"])
def test_rows_advance_by_different_amounts(
    architecture: str, windows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that are right for one row and wrong for another, many times over, until columns must be given back."""
    engine = dd.Engine(tiny_model(architecture), plan=dd.Plan.constant(LAYERS, LAYERS - 1, drop_order=[3]))
    expected = token_ids(engine, "full", PROMPTS, 60, eos_token_id=None)
    rounds = iter(range(1000))

    def told(self: Any, sampler: Any, last: torch.Tensor, indices: list[int], drafts: int, *_: Any) -> Any:
        turn = next(rounds)
        rows = []
        for row, index in enumerate(indices):
            text = (expected[row] + [0] * 20)[index + 1 : index + 1 + drafts]
            rows.append(text if (turn + row) % 3 else [(token + 1) % 90 for token in text])
        return torch.tensor(rows), []

    monkeypatch.setattr("depthdecay.lossless.LosslessDecoder.draft", told)
    results = engine.generate(PROMPTS, 60, mode="lossless", eos_token_id=None)
    assert [result.token_ids for result in results] == expected
    assert len({result.accepted for result in results}) > 1 or len({result.verifications for result in results}) > 1


def test_ends_and_stop_strings_are_those_of_full_depth(windows: list[int]) -> None:
    engine = perfect_engine()
    whole = token_ids(engine, "full", PROMPTS, 40, eos_token_id=None)
    ends = [whole[0][7], whole[1][11]]
    full = engine.generate(PROMPTS, 40, mode="full", eos_token_id=ends)
    lossless = engine.generate(PROMPTS, 40, mode="lossless", eos_token_id=ends)
    assert [(r.token_ids, r.finish_reason) for r in lossless] == [(r.token_ids, r.finish_reason) for r in full]
    assert all(len(r.draft_depths) == len(r.token_ids) for r in lossless)


@pytest.mark.parametrize("tokens", [1, 2, 3, 17])
def test_no_token_too_many(tokens: int, windows: list[int]) -> None:
    engine = perfect_engine()
    expected = token_ids(engine, "full", PROMPTS, tokens, eos_token_id=None)
    assert token_ids(engine, "lossless", PROMPTS, tokens, eos_token_id=None) == expected


def test_it_works_without_a_plan_and_refuses_what_it_cannot_do() -> None:
    engine = dd.Engine(tiny_model("llama"))
    expected = token_ids(engine, "full", PROMPTS, 12, eos_token_id=None)
    assert token_ids(engine, "lossless", PROMPTS, 12, eos_token_id=None) == expected
    with pytest.raises(DepthDecayError, match="stopping_criteria"):
        engine.generate(PROMPTS, 12, mode="lossless", stopping_criteria=[lambda ids, scores: False])
    for setting, value, complaint in (
        ("lookup", "yes", "lookup is 'yes'"),
        ("lookup", 1, "at least 2"),
        ("lookup", 50, "the prompt has only"),
        ("window", 0, "window is 0"),
        ("window", 16, "from 1 to 15"),
        ("window", True, "window is True"),
    ):
        with pytest.raises(DepthDecayError, match=complaint):
            engine.generate(PROMPTS[:1], 12, mode="lossless", **{setting: value})
    for layers in (1, 2, 3, 4, 5, 30):
        plan = drafting_plan(layers)
        assert plan.depth(5) <= layers


def test_it_is_the_mode_where_no_plan_is_given() -> None:
    model = tiny_model("llama")
    plan = dd.Plan.constant(LAYERS, LAYERS - 1, drop_order=[3])
    engine = dd.Engine(model, drafter=plan)
    (result,) = engine.generate(PROMPTS[:1], 20, eos_token_id=None)
    assert result.mode == "lossless"
    assert engine.drafting_plan is plan
    assert result.token_ids == token_ids(engine, "full", PROMPTS[:1], 20, eos_token_id=None)[0]
    # Rows would share their windows, and criteria look at every token.
    assert {r.mode for r in engine.generate(PROMPTS, 4, eos_token_id=None)} == {"full"}
    assert engine.generate(PROMPTS[:1], 4, stopping_criteria=[lambda ids, scores: False])[0].mode == "full"
    assert dd.Engine(model, plan=plan).generate(PROMPTS[:1], 4)[0].mode == "decay"
    with pytest.raises(DepthDecayError, match="layers"):
        dd.Engine(model, drafter=dd.Plan.constant(LAYERS + 3, 5))


def test_windows_are_as_long_as_asked_for(windows: list[int]) -> None:
    (result,) = perfect_engine().generate([PROMPTS[0]], 40, mode="lossless", window=2, lookup=0, eos_token_id=None)
    runs = "".join("x" if depth is None else "d" for depth in result.draft_depths).split("x")
    assert max(map(len, runs)) == 2


def test_sampling_keeps_the_full_models_distribution(windows: list[int]) -> None:
    """Unseeded draws of three tokens against those of full depth: the same frequencies within chance."""
    model = tiny_model("llama", vocab_size=6)
    engine = dd.Engine(model, plan=dd.Plan.constant(LAYERS, LAYERS - 2, drop_order=[3, 4]))
    counts = []
    for mode in ("full", "lossless"):
        results = engine.generate([[3, 4, 5]] * 1500, 3, mode=mode, do_sample=True, temperature=1.0, eos_token_id=None)
        last = torch.tensor([result.token_ids[2] for result in results])
        counts.append(torch.bincount(last, minlength=6).double())
    mean = (counts[0] + counts[1]) / 2
    square = float((((counts[0] - mean) ** 2 + (counts[1] - mean) ** 2) / mean.clamp(min=1)).sum())
    assert square < 20.5  # 5 degrees of freedom: once in a thousand runs


def test_the_expected_gain() -> None:
    assert expected_tokens(0.5, 2) == pytest.approx(1.75)
    assert expected_tokens(1.0, 4) == 5
    costs = StepCosts(0.5, lambda tokens: 1.0 + 0.1 * (tokens - 1))
    assert costs.rate(0.9, 0) == 1
    assert costs.rate(0.9, 3) == pytest.approx(expected_tokens(0.9, 3) / (1.5 + 1.3))
    simulated = torch.rand((20000, 3), generator=torch.Generator().manual_seed(0)) < 0.9
    assert float(simulated.long().cumprod(1).sum(1).double().mean()) + 1 == pytest.approx(
        expected_tokens(0.9, 3), rel=0.01
    )


def test_a_drafter_learns_and_stops() -> None:
    good = Drafter(StepCosts(0.3))
    for _ in range(50):
        count = good.window()
        good.saw(count, count)
    assert good.window() >= 8
    bad = Drafter(StepCosts(0.6))
    drafted = 0
    for _ in range(400):
        count = bad.window()
        drafted += count
        bad.saw(count, 0)
    assert drafted <= 12  # of 400 tokens: what it cost to find out stays under 3%
    # Text that becomes easy is noticed.
    for _ in range(1200):
        count = bad.window()
        bad.saw(count, count)
    assert bad.window() > 4


def test_lookup_finds_what_followed_before() -> None:
    assert Lookup([1, 2, 3, 4, 5, 9, 9, 2, 3]).after(3) == [4, 5, 9]
    assert Lookup([1, 2, 3, 7, 1, 2, 3, 8, 2, 3]).after(2) == [8, 2]  # the latest place
    assert Lookup([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2]).after(1) == [3]  # the longest end
    assert Lookup([1, 2, 3]).after(4) == []
    assert Lookup([]).after(4) == []
    grown = Lookup([1, 2, 3, 4])
    for token in (9, 1, 2):
        grown.add([token])
    assert grown.after(2) == [3, 4]
    grown.add([5])
    assert grown.after(2) == []


def test_lookup_is_used_and_can_be_switched_off() -> None:
    """A model that repeats itself: what follows is in the text already."""
    engine = perfect_engine()
    prompt = [7, 8, 9, 10, 11, 12] * 4
    for lookup in (True, False):
        (result,) = engine.generate([prompt], 60, mode="lossless", lookup=lookup, eos_token_id=None)
        assert result.token_ids == token_ids(engine, "full", [prompt], 60, eos_token_id=None)[0]
        assert (0 in result.draft_depths) <= lookup


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_rows_of_a_batch_look_up_in_their_own_texts(architecture: str) -> None:
    model = tiny_model(architecture)
    engine = dd.Engine(model, plan=dd.Plan.constant(LAYERS, LAYERS - 1, drop_order=[3]))
    looping = [[7, 8, 9, 10, 11, 12] * 4, [20, 21, 22] * 5, PROMPTS[0]]
    expected = token_ids(engine, "full", looping, 80, eos_token_id=None)
    found = 0
    for lookup in (True, False):
        results = engine.generate(looping, 80, mode="lossless", lookup=lookup, eos_token_id=None)
        assert [result.token_ids for result in results] == expected
        assert all(result.accepted <= result.drafted for result in results)
        drafted = [sum(depth == 0 for depth in result.draft_depths) for result in results]
        assert sum(drafted) == 0 or lookup
        found += sum(drafted)
    assert found > 0


def test_lookup_for_some_rows_is_weighed_against_drafts_for_all() -> None:
    drafting = Drafting(10, {5: 0.5})
    assert drafting.lookup_pays(0, 1.0)
    drafting.lookup.saw(40, 38)
    assert drafting.lookup_pays(0, 0.5)
    assert not drafting.lookup_pays(0, 0.01)
    for _ in range(40):
        drafting.by_depth[5].saw(5, 5)
    drafting.choose(0)
    assert not drafting.lookup_pays(0, 0.08)


def test_costs_come_from_what_was_timed() -> None:
    pace = Pace()
    assert pace.costs(0.7, 6).draft == 0.7
    assert 1.0 <= pace.costs(0.7).verify(4) < 1.1
    pace.saw("verify 1", 0.010)
    pace.saw("draft 6", 0.006)
    pace.saw("verify 5", 0.014)
    costs = pace.costs(0.7, 6)
    assert costs.draft == pytest.approx(0.6)
    assert pace.costs(0.7, 5).draft == 0.7
    assert costs.verify(5) == pytest.approx(1.4)
    assert costs.verify(3) == pytest.approx(1.2)
    assert costs.verify(1) == 1.0


class Replay:
    """Stands in for a CUDA graph: runs the recorded pass."""

    def __init__(self, run: Any) -> None:
        self.replay = run


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_graph_path_says_the_same(architecture: str, windows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets, padded windows and the device's clock, without a GPU."""
    from depthdecay.lossless_graphs import LosslessGraphDecoder

    monkeypatch.setattr("depthdecay.cache.BUCKET", 16)
    monkeypatch.setattr(LosslessGraphDecoder, "_capture", lambda self, run: Replay(run))
    engine = dd.Engine(tiny_model(architecture), plan=dd.Plan.constant(LAYERS, LAYERS - 2, drop_order=[3, 5]))
    expected = [token_ids(engine, "full", prompts, 30, eos_token_id=None) for prompts in (PROMPTS[:1], PROMPTS)]
    engine.uses_graphs = True
    for prompts, tokens in zip((PROMPTS[:1], PROMPTS), expected, strict=True):
        for settings in ({}, {"lookup": False}):
            results = engine.generate(prompts, 30, mode="lossless", eos_token_id=None, **settings)
            assert [result.token_ids for result in results] == tokens
            assert all(len(result.draft_depths) == 30 for result in results)
        assert engine._kept_lossless is not None
        assert any(key[0] == "verify" for key in engine._kept_lossless.graphs) == (len(prompts) == 1)
        kept = engine._kept_lossless
        shorter = [prompt[1:] for prompt in prompts]
        engine.generate(shorter, 20, mode="lossless", eos_token_id=None)  # graphs and cache are used again
        assert engine._kept_lossless is kept
        if len(prompts) == 1:  # a longer one too, of a single row
            longer = [[*prompts[0], *PROMPTS[1]]]
            engine.generate(longer, 40, mode="lossless", eos_token_id=None)
            assert engine._kept_lossless is kept
        again = token_ids(engine, "lossless", prompts, 30, eos_token_id=None)
        assert again == tokens


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])  # with whole masks, and with windows
def test_compiled_windows_say_the_same(architecture: str, windows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers, what stands beside them, masks and the ends of passes compiled, without a GPU."""
    from depthdecay.graphs import CompiledLayers
    from depthdecay.lossless_graphs import LosslessGraphDecoder

    def capture(self: LosslessGraphDecoder, run: Any) -> Replay:
        with self.window.unchanged():
            run()
        return Replay(run)

    torch._dynamo.reset()
    monkeypatch.setattr("depthdecay.cache.BUCKET", 16)
    monkeypatch.setattr(LosslessGraphDecoder, "_capture", capture)
    model = tiny_model(architecture)
    engine = dd.Engine(model, plan=dd.Plan.constant(LAYERS, LAYERS - 2, drop_order=[3, 5]), fast=False)
    expected = token_ids(engine, "full", PROMPTS[:1], 30, eos_token_id=None)
    engine.uses_graphs, engine.compiled = True, CompiledLayers()
    for settings in ({}, {"lookup": False}):
        (result,) = engine.generate(PROMPTS[:1], 30, mode="lossless", eos_token_id=None, **settings)
        assert [result.token_ids] == expected
        assert result.drafted > 0
    assert engine._kept_lossless is not None
    assert engine._kept_lossless.chains
    assert engine._kept_lossless.compiled is engine.compiled  # nothing was given up
    norm = next(child for name, child in engine.stack.owner.named_children() if name == "norm")
    assert "forward" not in norm.__dict__  # put back


def test_captures_and_timings_leave_no_trace(windows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both run a pass ahead of the one that counts: from where that one starts, or columns run out of the bucket."""
    from depthdecay.graphs import Capturer
    from depthdecay.lossless_graphs import LosslessGraphDecoder

    def capture(self: Capturer, warm_up: Any, run: Any) -> Replay:
        warm_up()
        return Replay(run)

    timed: list[str] = []

    def time(self: LosslessGraphDecoder, kind: str, graph: Replay) -> None:
        timed.append(kind)
        for _ in range(4):
            with self.window.unchanged():
                graph.replay()

    monkeypatch.setattr("depthdecay.cache.BUCKET", 16)
    monkeypatch.setattr(Capturer, "capture", capture)
    monkeypatch.setattr(LosslessGraphDecoder, "_time", time)
    engine = perfect_engine()  # whose windows are kept whole, so that a pass ahead moves on by all of it
    for start in range(len(PROMPTS[0])):
        prompt = PROMPTS[0][start:]
        expected = token_ids(engine, "full", [prompt], 60, eos_token_id=None)
        engine.uses_graphs = True
        assert token_ids(engine, "lossless", [prompt], 60, eos_token_id=None) == expected
        engine.uses_graphs = False
    assert {kind.split()[0] for kind in timed} == {"draft", "verify"}


def test_confidence_ends_a_window() -> None:
    drafter = Drafter(StepCosts(0.5, lambda tokens: 1.0))
    assert drafter.goes_on(0.99)
    assert not drafter.goes_on(0.2)
    engine = perfect_engine()
    told: list[float] = []

    def doubtful(self: Drafter, sure: float) -> bool:
        told.append(sure)
        return len(told) % 3 != 0  # asked after every draft but the last that there may be

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafter, "window", lambda self: 6)
        patch.setattr(Drafter, "goes_on", doubtful)
        (result,) = engine.generate([PROMPTS[0]], 30, mode="lossless", lookup=False, eos_token_id=None)
    assert result.token_ids == token_ids(engine, "full", [PROMPTS[0]], 30, eos_token_id=None)[0]
    # Three drafts, then doubt: four tokens a window.
    assert result.draft_depths[1:9] == [LAYERS - 1] * 3 + [None] + [LAYERS - 1] * 3 + [None]
    assert all(0 < sure <= 1 for sure in told)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts choose among few tokens, also in the tiny vocabularies of these models."""
    for name, value in {"LEAST": 24, "SHARE": 1000, "SPARE": 8, "WORTH": 0.0}.items():
        monkeypatch.setattr(f"depthdecay.short_head.{name}", value)


@pytest.mark.usefixtures("short", "windows")
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("graphs", [False, True])
def test_drafts_from_a_few_tokens(architecture: str, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from depthdecay.lossless_graphs import LosslessGraphDecoder

    monkeypatch.setattr(LosslessGraphDecoder, "_capture", lambda self, run: Replay(run))
    model = tiny_model(architecture)
    forward = model.get_output_embeddings().forward
    engine = dd.Engine(model, plan=dd.Plan.constant(LAYERS, LAYERS - 1, drop_order=[3]))
    for prompts in (PROMPTS[:1], PROMPTS):
        expected = token_ids(engine, "full", prompts, 30, eos_token_id=None)
        engine.uses_graphs = graphs
        for _ in range(2):
            assert token_ids(engine, "lossless", prompts, 30, eos_token_id=None) == expected
        engine.uses_graphs = False
    assert engine._short_head is not None
    assert engine._short_head.weight.shape[0] == 64
    assert model.get_output_embeddings().forward == forward


@pytest.mark.usefixtures("short")
def test_a_short_head_takes_the_texts_own_tokens_in() -> None:
    from depthdecay.short_head import ShortHead
    from depthdecay.stack import Stack

    model = tiny_model("llama")
    model.generation_config.eos_token_id = 90
    head = ShortHead.of(Stack.of(model), torch.tensor([40, 41]))
    assert head is not None
    assert head.ids[: head.fixed].tolist() == [*range(24), 40, 41, 90]
    head.start([1, 50, 60, 50])
    assert head.ids[head.fixed : head.fixed + 2].tolist() == [50, 60]
    head.add(range(60, 80))
    assert head.ids[head.fixed : head.fixed + 8].tolist() == [50, 60, *range(61, 67)]  # as many as there is room for
    assert torch.equal(head.weight, model.get_output_embeddings().weight[head.ids])
    hidden = torch.randn(3, model.config.hidden_size)
    with head.in_place():
        assert torch.allclose(model.lm_head(hidden), (hidden @ model.lm_head.weight.T)[:, head.ids])
    head.start([70])
    assert head.ids[head.fixed] == 70
    assert head.is_for(Stack.of(model))
    assert not head.is_for(Stack.of(model.to(torch.bfloat16)))


def test_small_vocabularies_are_drafted_from_whole() -> None:
    engine = perfect_engine()
    engine.generate([PROMPTS[0]], 4, mode="lossless")
    assert engine._short_head is None


def test_a_pass_that_cannot_be_captured_is_run_eagerly(windows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first graph, or after some windows."""
    from depthdecay.lossless_graphs import LosslessGraphDecoder

    for allowed in (0, 1, 2, 3):
        engine = perfect_engine()
        expected = token_ids(engine, "full", PROMPTS[:1], 30, eos_token_id=None)
        count = iter(range(100))

        def capture(self: Any, run: Any, count: Any = count, allowed: int = allowed) -> Replay:
            if next(count) >= allowed:
                raise RuntimeError("no capture")
            return Replay(run)

        monkeypatch.setattr(LosslessGraphDecoder, "_capture", capture)
        engine.uses_graphs = True
        with pytest.warns(UserWarning, match="eagerly: no capture"):
            assert token_ids(engine, "lossless", PROMPTS[:1], 30, eos_token_id=None) == expected


def test_a_capture_that_fails_behind_another_request_starts_from_its_own_place(
    windows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from depthdecay.lossless_graphs import LosslessGraphDecoder

    sampled: dict[str, Any] = {"do_sample": True, "seed": 5, "temperature": 0.7}
    engine = perfect_engine()
    expected = token_ids(engine, "full", PROMPTS[:1], 30, eos_token_id=None, **sampled)
    engine.uses_graphs = True
    monkeypatch.setattr(LosslessGraphDecoder, "_capture", lambda self, run: Replay(run))
    token_ids(engine, "lossless", PROMPTS[:1], 30, eos_token_id=None)  # its windows went on by themselves

    def fail(self: Any, run: Any) -> None:
        raise RuntimeError("no capture")

    monkeypatch.setattr(LosslessGraphDecoder, "_capture", fail)
    with pytest.warns(UserWarning, match="eagerly: no capture"):
        assert token_ids(engine, "lossless", PROMPTS[:1], 30, eos_token_id=None, **sampled) == expected


@pytest.mark.parametrize("lookup", [0, 3])
def test_plain_steps_run_ahead_while_drafting_pauses(lookup: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from depthdecay.lossless_graphs import LosslessGraphDecoder

    monkeypatch.setattr(LosslessGraphDecoder, "_capture", lambda self, run: Replay(run))
    under_way: list[int] = []
    collect = LosslessGraphDecoder.collect

    def counted(self: Any) -> list[int]:
        under_way.append(len(self._underway))
        return collect(self)

    monkeypatch.setattr(LosslessGraphDecoder, "collect", counted)
    engine = dd.Engine(tiny_model("llama"), plan=dd.Plan.constant(LAYERS, 4, drop_order=[3, 5, 2, 6]))
    for tokens in (1, 2, 3, 60):
        expected = token_ids(engine, "full", PROMPTS[:1], tokens, eos_token_id=None)
        engine.uses_graphs = True
        assert token_ids(engine, "lossless", PROMPTS[:1], tokens, eos_token_id=None, lookup=lookup) == expected
        engine.uses_graphs = False
    assert set(under_way) == {1, 2}
    assert under_way.count(2) > 20


@pytest.mark.parametrize(("lookup", "most_finds"), [(0, 0.3), (3, -1.0), (3, 1.0)])
def test_a_window_is_begun_before_the_last_one_is_known(
    lookup: int, most_finds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the device does not wait for the host. Where lookup often finds something, such drafts would be lost."""
    from depthdecay.lossless_graphs import LosslessGraphDecoder

    monkeypatch.setattr("depthdecay.lossless.MOST_FINDS", most_finds)
    monkeypatch.setattr(LosslessGraphDecoder, "_capture", lambda self, run: Replay(run))
    ahead: list[bool] = []
    launch, draft_one = LosslessGraphDecoder.launch, LosslessGraphDecoder.draft_one
    passes = 0

    def launched(self: Any, width: int) -> None:
        nonlocal passes
        passes += LAYERS
        launch(self, width)

    def drafted(self: Any, depth: int, step: int) -> None:
        nonlocal passes
        passes += depth
        if step == 0:
            ahead.append(bool(self._underway))
        draft_one(self, depth, step)

    monkeypatch.setattr(LosslessGraphDecoder, "launch", launched)
    monkeypatch.setattr(LosslessGraphDecoder, "draft_one", drafted)
    engine = perfect_engine()
    engine._prepared_drafting().pace.takes("draft 7", 0.1)
    engine._prepared_drafting().pace.takes("verify 1", 1.0)
    expected = token_ids(engine, "full", PROMPTS[:1], 60, eos_token_id=None)
    engine.uses_graphs = True
    for _ in range(3):
        passes = LAYERS  # the first token comes with the prompt
        (result,) = engine.generate(PROMPTS[:1], 60, mode="lossless", eos_token_id=None, lookup=lookup)
        assert [result.token_ids] == expected
        assert result.layer_passes == passes  # with drafts that were lost
    assert ahead.count(True) > 6 if most_finds > 0 else not any(ahead)


@pytest.mark.parametrize("width", [64 * 5, 100])
def test_a_draft_is_the_likeliest_token_with_its_probability(width: int) -> None:
    from depthdecay.lossless_graphs import Window, take_draft

    window = Window(torch.device("cpu"))
    window.turn.fill_(2)
    names = torch.randperm(1000)[:width]
    for step in range(3):
        logits = torch.randn(1, width) * 3
        take_draft(logits, names, window.ids, window.drafted, window.confidences, window.turn)
        assert window.drafted.item() == step + 1
        assert window.ids[0, step + 1] == names[logits.argmax()]
        assert float(window.confidences[2, step]) == pytest.approx(float(logits.softmax(-1).max()), rel=1e-5)


def learn(drafting: Drafting, right: dict[int, float], tokens: int = 4000, seed: int = 0) -> dict[int, int]:
    """Windows on a made-up text, whose drafts are right this often at each depth; how often each depth drafted."""
    chance = torch.Generator().manual_seed(seed)
    used = dict.fromkeys(right, 0)
    position = 0
    while position < tokens:
        drafter = drafting.choose(position)
        count = drafter.window()
        draws = torch.rand(count, generator=chance) < right[drafter.depth]
        accepted = int(draws.long().cumprod(0).sum()) if count else 0
        drafter.saw(count, accepted)
        used[drafter.depth] += count > 0
        position += accepted + 1
    return used


def test_the_depth_with_the_best_rate_is_found() -> None:
    shares = {12: 0.4, 16: 0.55, 20: 0.7}
    for best, right in {
        12: {12: 0.95, 16: 0.96, 20: 0.97},
        16: {12: 0.5, 16: 0.95, 20: 0.96},
        20: {12: 0.3, 16: 0.5, 20: 0.98},
    }.items():
        used = learn(Drafting(28, shares), right)
        assert used[best] > 0.8 * sum(used.values())
    hopeless = learn(Drafting(28, shares), {12: 0.05, 16: 0.1, 20: 0.1})
    assert sum(hopeless.values()) < 40  # of 4000 tokens


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("draft", [0.3, 0.5, 0.77])
def test_drafting_that_does_not_pay_costs_at_most_three_percent(draft: float, noise: float) -> None:
    """On made-up text and a machine whose times vary: what is learnt is what was timed and seen, as in an engine."""

    def speed(right: float, seed: int) -> float:
        chance = random.Random(seed)
        drafting = Drafting(30, {23: draft})
        pace, told, cost = drafting.pace, 0, 0.0

        def timed(seconds: float) -> float:
            return seconds * max(0.8, chance.gauss(1, noise) + (0.5 if chance.random() < 0.3 * noise else 0))

        while told < 3000:
            drafter = drafting.choose(told % 200)
            count = drafter.window()
            drafts = [timed(draft) for _ in range(count)]
            seconds = timed(1.0 if count == 0 else 1.15 + 0.02 * count)
            if drafts:
                pace.saw("draft 23", sum(drafts) / count)
            pace.saw(f"verify {count + 1}", seconds)
            seconds += sum(drafts)
            accepted = next((place for place in range(count) if chance.random() > right), count)
            step = pace.seconds.get("verify 1")
            drafter.saw(count, accepted, cost=None if step is None else seconds / step)
            told, cost = told + accepted + 1, cost + seconds
        return told / cost * (1 + 0.15 * noise)  # what a plain step takes on average

    for right in (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9):
        assert sum(speed(right, seed) for seed in range(4)) / 4 > 0.97
    assert speed(0.97, 0) > {0.3: 1.8, 0.5: 1.3, 0.77: 0.97}[draft]


def test_a_drafter_knows_where_it_is_and_how_sure() -> None:
    drafter = Drafter(StepCosts(0.4))
    for _ in range(60):
        drafter.position = 10
        drafter.saw(4, 1, [0.99, 0.4, 0.4, 0.4])
    drafter.position = 300
    assert drafter.acceptance < 0.7  # a first guess from the place before
    for _ in range(60):
        drafter.saw(4, 4, [0.9] * 4)
    assert drafter.acceptance > 0.95
    assert drafter.likelihood(0.99) > 0.95
    assert drafter.likelihood(0.4) < 0.2
    drafter.position = 10
    assert drafter.acceptance < 0.6


def test_depths_to_draft_at() -> None:
    from depthdecay.repairs import Repairs

    plan = dd.Plan.constant(28, 17)
    assert draft_depths(plan, Repairs()) == [17]
    assert draft_depths(plan, Repairs(dict.fromkeys(range(14, 28), ()))) == [14, 17, 20, 23]
    assert draft_depths(plan, Repairs({17: ()})) == [17]
