"""Calibration: the simulation against real decoding, maps, search, budgets, resuming, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibrations import SMALL, random_repairs, token_prompts
from tiny_models import ARCHITECTURES, LAYERS, PROMPTS, tiny_model

import depthdecay as dd
from depthdecay.calibration.calibration import Calibration
from depthdecay.calibration.continuations import Continuation, continue_prompts, read_prompts, split_prompts, variety
from depthdecay.calibration.drafted_texts import Drafts, can_simulate_drafts
from depthdecay.calibration.drafter import expected
from depthdecay.calibration.fidelity import Simulator
from depthdecay.calibration.fit import FitSettings, Moments, Trace, _sample, fit_plan
from depthdecay.calibration.goal import Goal, upper_bound
from depthdecay.calibration.influence import block_influence
from depthdecay.calibration.recording import Recording
from depthdecay.calibration.search import Found, Search
from depthdecay.errors import DepthDecayError
from depthdecay.model.costs import Costs, cost_speedup
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repair, Repairs, repaired_at_once
from depthdecay.model.speedup import plan_at_speedup
from depthdecay.plan.ladder import runs_of
from depthdecay.plan.shelf import drafter_of
from depthdecay.runners.block_runner import BlockRunner
from depthdecay.runners.contract import Part
from depthdecay.runners.kv_blocks import KVBlocks

ORDER = [3, 4, 6, 1]


def decaying_plan() -> dd.Plan:
    return dd.Plan.decay(LAYERS, alpha=0.93, drop_order=ORDER, min_layers=4)


def texts_of(engine: dd.Engine, tokens: int = 24) -> list[Continuation]:
    prompts = [list(prompt) for prompt in PROMPTS]
    results = engine.generate(prompts, tokens, eos_token_id=None)
    return [Continuation(tuple(p), tuple(r.token_ids)) for p, r in zip(prompts, results, strict=True)]


def random_texts(count: int, tokens: int, vocabulary: int = 90) -> list[Continuation]:
    numbers = np.random.default_rng(0).integers(3, vocabulary, (count, 6 + tokens)).tolist()
    return [Continuation(tuple(row[: 4 + i % 3]), tuple(row[6:])) for i, row in enumerate(numbers)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_simulation_equals_decoding(architecture: str) -> None:
    """Teacher-forced with the decayed model's own text, the simulation must pick that very text."""
    model, plan = tiny_model(architecture), decaying_plan()
    stack = LayerStack.of(model)
    repairs = random_repairs(plan, stack.hidden_size, neurons=3)
    for maps in (None, repairs):
        engine = dd.Engine(model, plan=plan, repairs=maps)
        recording = Recording.of(stack, texts_of(engine))
        (batch,) = recording.batches
        state = Simulator(recording).final_state(batch, plan, maps)
        picked = torch.cat([logits for _, logits in recording.logits(batch, state)]).argmax(-1)
        assert torch.equal(picked, batch.targets)
        full = Simulator(recording).measure(dd.Plan.full(LAYERS))
        assert full.kl == 0
        assert full.agreement == 1
        assert Simulator(recording).measure(plan, maps).kl > 0


def test_the_simulation_gives_the_logits_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = tiny_model("llama"), decaying_plan()
    stack = LayerStack.of(model)
    repairs = random_repairs(plan, stack.hidden_size)
    seen: list[torch.Tensor] = []
    pick = dd.Engine._pick

    def keep(self: Any, decoder: Any, *args: Any) -> Any:
        seen.append(decoder.logits.clone())
        return pick(self, decoder, *args)

    monkeypatch.setattr(dd.Engine, "_pick", keep)
    engine = dd.Engine(model, plan=plan, repairs=repairs)
    recording = Recording.of(stack, texts_of(engine))
    (batch,) = recording.batches
    state = Simulator(recording).final_state(batch, plan, repairs)
    given = torch.cat([logits for _, logits in recording.logits(batch, state)])
    order = sorted(range(len(PROMPTS)), key=lambda i: (len(PROMPTS[i]), tuple(PROMPTS[i])))
    decoded = torch.stack(seen[1:], dim=1)[order]
    torch.testing.assert_close(given, decoded, atol=1e-4, rtol=1e-4)


def test_applied_runs_repairs_as_the_engine_does(tmp_path: Path) -> None:
    model, plan = tiny_model("qwen2"), decaying_plan()
    repairs = random_repairs(plan, LayerStack.of(model).hidden_size, neurons=2)
    repairs.save(tmp_path / "repairs.safetensors")
    replace(plan, repairs="repairs.safetensors").save(tmp_path)
    loaded = dd.Plan.load(tmp_path)
    ids = torch.tensor([PROMPTS[0]])
    with dd.applied(model, loaded):
        tokens = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = dd.Engine(model, plan=loaded).generate([list(PROMPTS[0])], 20, eos_token_id=None)[0].token_ids
    assert tokens[0, ids.shape[1] :].tolist() == expected
    plain = dd.Engine(model, plan=plan).generate([list(PROMPTS[0])], 20, eos_token_id=None)[0].token_ids
    assert plain != expected  # random maps must show
    full = dd.Engine(model, plan=loaded).generate([list(PROMPTS[0])], 20, mode="full", eos_token_id=None)[0].token_ids
    assert full == dd.Engine(model).generate([list(PROMPTS[0])], 20, eos_token_id=None)[0].token_ids


def test_repairs_survive_a_file_and_share_maps(tmp_path: Path) -> None:
    plan = decaying_plan()
    repairs = random_repairs(plan, 32, neurons=2)
    shared = Repairs({**repairs.at_depth, 6: repairs.at_depth[6], 5: (*repairs.at_depth[6], repairs.at_depth[5][-1])})
    loaded = Repairs.load(shared.save(tmp_path / "maps.safetensors"))
    assert set(loaded.at_depth) == set(shared.at_depth)
    for depth, maps in shared.at_depth.items():
        for ours, theirs in zip(maps, loaded.at_depth[depth], strict=True):
            assert (ours.start, ours.end) == (theirs.start, theirs.end)
            assert all(torch.equal(a, b) for a, b in zip(ours.parts, theirs.parts, strict=True))
    assert loaded.at_depth[5][0] is loaded.at_depth[6][0]
    repairs.check(plan, 32)


@pytest.mark.parametrize("damage", ["width", "layers", "missing-depth", "no-file", "garbage", "nan"])
def test_repairs_that_do_not_fit_are_refused(damage: str, tmp_path: Path) -> None:
    model, plan = tiny_model("llama"), decaying_plan()
    hidden = LayerStack.of(model).hidden_size
    repairs = random_repairs(plan, hidden + 1 if damage == "width" else hidden)
    maps = dict(repairs.at_depth)
    if damage == "layers":
        maps[7] = (replace(maps[7][0], start=2, end=3),)
    if damage == "missing-depth":
        del maps[5]
    if damage == "nan":
        maps[7] = (replace(maps[7][0], bias=torch.full((hidden,), float("nan"))),)
    file = Repairs(maps).save(tmp_path / "repairs.safetensors")
    if damage == "no-file":
        file.unlink()
    if damage == "garbage":
        file.write_bytes(b"not a tensor in sight")
    replace(plan, repairs="repairs.safetensors").save(tmp_path)
    with pytest.raises(DepthDecayError) as error:
        dd.Engine(model, plan=dd.Plan.load(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("neurons", [0, 5])
def test_a_map_at_once_is_the_same_map(neurons: int) -> None:
    torch.manual_seed(0)
    shapes = [(4, 16), (16, 4), (16,)] + ([(neurons, 16), (neurons, 16), (16, neurons)] if neurons else [])
    repair = Repair(2, 4, *(torch.randn(shape) for shape in shapes))
    hidden = torch.randn(2, 3, 16)
    assert torch.allclose(repaired_at_once(hidden, *repair.parts_at_once), repair(hidden), atol=1e-5)
    assert repair.parts_at_once is repair.parts_at_once


def test_a_linear_layer_is_repaired_exactly() -> None:
    """What a map can say, it says: outputs that are linear in the normalised state leave nothing over."""
    generator = torch.Generator().manual_seed(0)
    state = torch.randn((400, 12), generator=generator)
    state[:, 3] *= 7
    normal = state * state.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
    weight = torch.randn((12, 3), generator=generator) @ torch.randn((3, 12), generator=generator)
    target = state + normal @ weight + 0.5
    moments = Moments(12, torch.device("cpu"))
    for part in range(0, 400, 100):
        moments.add(state[part : part + 100], target[part : part + 100])
    repair = moments.solve(0, 1, FitSettings(rank=3, ridge=1e-9)).to(torch.device("cpu"), torch.float32)
    torch.testing.assert_close(repair(state), target, atol=1e-3, rtol=1e-3)
    assert repair.rank == 3
    small = moments.solve(0, 1, FitSettings(rank=1, ridge=1e-9)).to(torch.device("cpu"), torch.float32)
    left = float((small(state) - target).norm())
    assert left > 0.1
    # The best of its rank: no other map of rank 1 that a wrong choice of directions would give comes near.
    whole = (target - state - 0.5).T.cov()
    values = torch.linalg.eigvalsh(whole).flip(0)
    assert left**2 / 400 == pytest.approx(float(values[1:].sum()), rel=0.2)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_maps_lower_the_kl_of_dropped_layers(architecture: str) -> None:
    stack = LayerStack.of(tiny_model(architecture))
    texts = random_texts(64, 24)
    fit, held = Recording.of(stack, texts[:48]), Recording.of(stack, texts[48:])
    plan = dd.Plan.for_speedup(LAYERS, 1.2, over_tokens=24, drop_order=ORDER)
    trace, maps = Trace(fit), {}
    for rung, layer in enumerate(ORDER, start=1):
        trace = trace.without([layer], FitSettings(16, 4, 0.01))
        maps[LAYERS - rung] = trace.repairs
    constant = Repairs(maps)
    constant.check(plan, stack.hidden_size)
    simulator = Simulator(held)
    plain, repaired = simulator.measure(plan), simulator.measure(plan, constant)
    assert repaired.kl < 0.8 * plain.kl
    fitted = fit_plan(fit, plan, FitSettings(16, 4, 0.1), constant)
    fitted.check(plan, stack.hidden_size)
    assert simulator.measure(plan, fitted).kl < 0.9 * plain.kl
    has_neurons = any(repair.neurons for repairs in fitted.at_depth.values() for repair in repairs)
    assert has_neurons == (architecture == "llama")


def test_a_trace_that_goes_on_equals_one_from_the_start() -> None:
    """What is shared between rungs must be what fitting anew would give."""
    stack = LayerStack.of(tiny_model("llama"))
    recording = Recording.of(stack, random_texts(24, 12))
    settings = FitSettings(8, 2, 0.01)
    steps = Trace(recording)
    for layer in ORDER:
        steps = steps.without([layer], settings)
    # A map before the last change was fitted on states that later rungs did not touch.
    whole = Trace(recording).without(ORDER, settings)
    assert [(r.start, r.end) for r in steps.repairs] == [(r.start, r.end) for r in whole.repairs]
    for ours, theirs in zip(steps.states, whole.states, strict=True):
        torch.testing.assert_close(ours[-1], theirs[-1], atol=1e-3, rtol=1e-3)


def search_on(recording: Recording, **changes: Any) -> Search:
    settings: dict[str, Any] = {
        "fitted_on": len(recording.batches) - 1,
        "candidates": range(1, LAYERS - 1),
        "lowest_depth": 4,
        "settings": FitSettings(8, 0, 0.01),
        "layer_costs": [1.0] * LAYERS,
    }
    return Search(recording, **(settings | changes))


def test_the_search_drops_a_layer_that_does_nothing_first_and_resumes() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[5].self_attn.o_proj.weight.zero_()
        model.model.layers[5].mlp.down_proj.weight.zero_()
    stack = LayerStack.of(model)
    recording = Recording.of(stack, random_texts(40, 12), rows=8)
    saved: list[list[dict[str, Any]]] = []
    influence = block_influence(recording)
    assert influence[5] == pytest.approx(0, abs=1e-6)
    search = search_on(recording, save=lambda beam: saved.append([found.to_dict() for found in beam]))
    found = search.run(influence)
    assert found.order[0] == 5
    assert found.kls[0] < 1e-6
    assert len(found.order) == LAYERS - 4
    assert len(set(found.order)) == len(found.order)
    again = search_on(recording).run(influence)
    assert again.order == found.order  # same input, same ladder
    halfway = json.loads(json.dumps(saved[1]))
    resumed = search_on(recording).run(influence, [Found.from_dict(values) for values in halfway])
    assert resumed.order == found.order


def test_a_wider_search_is_no_worse_and_a_late_one_ends() -> None:
    stack = LayerStack.of(tiny_model("llama"))
    recording = Recording.of(stack, random_texts(40, 12), rows=8)
    influence = block_influence(recording)
    greedy = search_on(recording, beam=1, width=1).run(influence)
    wide = search_on(recording, beam=3, width=6).run(influence)
    assert sum(wide.kls) <= sum(greedy.kls) + 1e-9
    late = search_on(recording, seconds=0.0).run(influence)
    assert len(late.order) == LAYERS - 4


def test_costs_count_maps_and_the_head_and_leave_out_the_first_token() -> None:
    model, plan = tiny_model("llama"), decaying_plan()
    stack = LayerStack.of(model)
    repairs = random_repairs(plan, stack.hidden_size)
    layers, head = stack.layer_bytes(), stack.head_bytes()
    costs = Costs(stack, plan, repairs)
    kept = sum(size for index, size in enumerate(layers) if index not in (3, 4))
    maps = sum(part.numel() for part in repairs.at(6)[3].parts) * 4
    assert costs.at(6) == kept + maps + head
    steps = [costs.at(plan.depth(i)) for i in range(1, 10)]
    assert cost_speedup(plan, stack, 10, repairs) == pytest.approx((sum(layers) + head) / (sum(steps) / 9))
    assert cost_speedup(plan, stack, 10, Repairs()) > cost_speedup(plan, stack, 10, repairs)


def test_a_plan_is_rescheduled_with_its_maps_counted() -> None:
    stack = LayerStack.of(tiny_model("llama"))
    plan = dd.Plan.for_speedup(LAYERS, 1.3, over_tokens=64, drop_order=ORDER)
    repairs = random_repairs(plan, stack.hidden_size)
    bare = plan_at_speedup(plan, stack, 1.25, 100, Repairs())
    paid = plan_at_speedup(plan, stack, 1.25, 100, repairs)
    assert bare.layers_executed(100) <= LAYERS * 100 / 1.25
    assert paid.layers_executed(100) < bare.layers_executed(100)
    costs = Costs(stack, plan, repairs)
    assert LAYERS * 100 / float(sum(costs.in_layers(d) for d in paid.depths(100))) >= 1.25
    assert paid.ladder == plan.ladder
    with pytest.raises(DepthDecayError, match="cannot be reached"):
        plan_at_speedup(plan, stack, 3, 100, repairs)


def test_the_bound_covers_the_mean_over_tokens() -> None:
    losses = np.random.default_rng(1).exponential(0.02, 64)
    bound = upper_bound(losses.tolist(), [10] * 64)
    error = losses.std() / 8
    assert losses.mean() + error < bound < losses.mean() + 3 * error
    # Long texts that are worse weigh by their tokens: a mean over prompts would lie below what was measured.
    tokens = [100 if loss > 0.04 else 5 for loss in losses]
    mean = float((losses * tokens).sum() / sum(tokens))
    assert losses.mean() < 0.7 * mean
    assert upper_bound(losses.tolist(), tokens) > mean


@pytest.mark.parametrize("prompts", [8, 32])
def test_the_bound_holds_about_as_often_as_it_says(prompts: int) -> None:
    generator = np.random.default_rng(0)
    held = [
        upper_bound(generator.exponential(1.0, prompts).tolist(), [7] * prompts, seed=i, draws=300) >= 1.0
        for i in range(300)
    ]
    assert np.mean(held) > 0.88  # the plain percentile holds in 80 to 88 of 100


def test_calibration_makes_a_plan_that_the_engine_runs(tmp_path: Path) -> None:
    model = tiny_model("llama")
    run = Calibration(model, None, token_prompts(), tmp_path, SMALL)
    made = run.make(Goal(speedup=1.2))
    made.save(tmp_path)
    plan = dd.Plan.load(tmp_path)
    assert plan.repairs
    assert made.figures["promise"]["layer_speedup_with_repairs"] >= 1.2
    assert made.figures["repaired"]["kl"] < made.figures["plain"]["kl"]
    assert len(plan.notes["block_influence"]) == LAYERS
    result = dd.Engine(model, plan=plan).generate([[5, 6, 7]], 16, eos_token_id=None)[0]
    assert result.depths == list(plan.depths(16))
    # What was measured is what the saved plan does, on the texts that were held out.
    again = Simulator(run.held_out).measure(plan, Repairs.load(tmp_path / "repairs.safetensors"))
    assert again.kl == pytest.approx(made.figures["repaired"]["kl"], rel=1e-3)
    held = {tuple(row) for batch in run.held_out.batches for row in batch.inputs.tolist()}
    fitted = {tuple(row) for part in (run.fit, run.select) for batch in part.batches for row in batch.inputs.tolist()}
    assert not held & fitted


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "gpt2", "mixtral"])
def test_drafts_are_simulated_as_lossless_mode_makes_them(architecture: str) -> None:
    model = tiny_model(architecture)
    stack = LayerStack.of(model)
    assert can_simulate_drafts(stack)
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14]]
    texts = continue_prompts(dd.Engine(model), prompts, 14, batch=2)
    recording = Recording.of(stack, texts)
    Simulator(recording).measure(
        dd.Plan.constant(LAYERS, LAYERS - 2, drop_order=ORDER)
    )  # writes shallow keys over the full model's
    drafts, plan = Drafts(recording), dd.Plan.constant(LAYERS, LAYERS - 4, drop_order=ORDER)
    (batch,) = recording.batches
    (_, simulated), *_ = list(drafts.logits(batch, Simulator(drafts).final_state(batch, plan)))
    depth = plan.schedule.final_depth
    for row, text in enumerate(sorted(texts, key=lambda text: (len(text.prompt), text.prompt))):
        for column in range(0, len(text.tokens) - 1, 3):
            before = [*text.prompt, *text.tokens[:column]]
            blocks = KVBlocks.of_rows(stack.kept_shapes(), [[len(before) + 1] * LAYERS])
            runner = BlockRunner(stack, blocks, Repairs())
            runner.run([Part(0, 0, before, LAYERS, plan)])
            drafted = runner.run([Part(0, len(before), [text.tokens[column]], depth, plan)]).logits[0]
            torch.testing.assert_close(simulated[row, column], drafted, atol=2e-4, rtol=1e-3)


def test_a_plan_to_draft_with_is_the_fastest_by_measured_agreement(tmp_path: Path) -> None:
    model = tiny_model("llama")
    run = Calibration(model, None, token_prompts(), tmp_path, SMALL)
    made = run.make(Goal(lossless=True))
    rates = [found["speedup"] for found in made.figures["tried"]]
    chosen = made.figures["drafting"]
    best = max(made.figures["tried"], key=lambda found: found["speedup"])
    assert (chosen["depth"], chosen["cost"]) == (best["depth"], best["cost"])
    assert max(rates) > min(rates)
    only = made.repairs.only({best["depth"]})
    assert best["acceptance"] == pytest.approx(Simulator(Drafts(run.select)).measure(made.plan, only).agreement)
    assert chosen["acceptance"] == pytest.approx(Simulator(Drafts(run.held_out)).measure(made.plan, only).agreement)
    assert expected(5, 1.0, 0.5).speedup > 1.0 > expected(5, 0.2, 0.5).speedup
    made.save(tmp_path)
    plan = dd.Plan.load(tmp_path)
    engine = dd.Engine(model, plan=plan)
    assert set(engine._prepared_drafting().by_depth) == set(made.repairs.at_depth)
    for prompt in token_prompts()[:3]:
        full, lossless = (engine.generate([prompt], 30, mode=m, eos_token_id=None)[0] for m in ("full", "lossless"))
        assert lossless.token_ids == full.token_ids
    assert drafter_of(plan) == plan
    made.save(tmp_path / "lossless")
    assert drafter_of(dd.Plan.load(tmp_path)).folder == tmp_path / "lossless"
    with pytest.raises(DepthDecayError, match="give one of"):
        Goal(lossless=True, speedup=1.2)


def test_a_budget_is_kept_with_its_bound_or_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    run = Calibration(model, None, token_prompts(), tmp_path, SMALL)
    loose = run.make(Goal(max_kl=0.5)).figures["promise"]
    assert loose["bound"] <= 0.5
    assert loose["layer_speedup_with_repairs"] > 1
    agreed = run.make(Goal(max_agreement_loss=0.9)).figures["promise"]
    assert agreed["bound"] <= 0.9
    with pytest.raises(DepthDecayError, match=r"no plan of this model keeps .* the nearest is"):
        run.make(Goal(max_kl=1e-9))
    assert not (tmp_path / "plan.json").exists()


def test_an_interrupted_calibration_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    rungs: list[str] = []

    def interrupt(message: str) -> None:
        if message.startswith("searching"):
            rungs.append(message)
            if len(rungs) == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Calibration(model, None, token_prompts(), tmp_path, SMALL, say=interrupt)
    calls: list[int] = []
    monkeypatch.setattr("depthdecay.calibration.texts.continue_prompts", lambda *a, **k: calls.append(1))
    said: list[str] = []
    run = Calibration(model, None, token_prompts(), tmp_path, SMALL, say=said.append)
    assert not calls
    assert sum(message.startswith("searching") for message in said) == len(run.found.order) - 2
    monkeypatch.undo()
    fresh = Calibration(model, None, token_prompts(), tmp_path / "fresh", SMALL)
    assert fresh.found.order == run.found.order
    # Other settings do not take what was left.
    other = Calibration(model, None, token_prompts(), tmp_path, replace(SMALL, seed=1))
    assert other.found.order


def test_continuations_keep_the_order_of_the_prompts() -> None:
    engine = dd.Engine(tiny_model("llama"))
    prompts = token_prompts(5)
    prompts[2] = prompts[2] * 2
    texts = continue_prompts(engine, prompts, 6, batch=2)
    assert [list(text.prompt) for text in texts] == prompts
    alone = [engine.generate([prompt], 6, do_sample=False)[0].token_ids for prompt in prompts]
    assert [list(text.tokens) for text in texts] == alone


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"question": "a"}\n{"answer": 2}\n', "line 2 has none of the fields"),
        ('{"question": "a"}\nnonsense\n', "line 2 is not JSON"),
        ("[1, 2]\n", "line 1 is list"),
        ('{"prompt": 5}\n', "line 1: prompt must be a text"),
        ('{"messages": [{"role": "user"}]}\n', "line 1: messages must be a list"),
        ("\n\n", "holds no prompt"),
    ],
)
def test_prompts_in_a_wrong_format_are_named_by_line(content: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(DepthDecayError, match=complaint):
        read_prompts(file)


def test_prompts_are_split_without_overlap_and_too_few_are_refused() -> None:
    prompts = token_prompts(40)
    made = split_prompts(prompts * 2, None, vocabulary=96, calibration=30, held_out=10, longest=None, seed=0)
    calibration, held_out = {tuple(p) for p in made.calibration}, {tuple(p) for p in made.held_out}
    assert (len(calibration), len(held_out)) == (30, 10)
    assert not calibration & held_out
    again = split_prompts(prompts[::-1], None, vocabulary=96, calibration=30, held_out=10, longest=None, seed=0)
    assert again.held_out == made.held_out
    fewer = split_prompts(prompts, None, vocabulary=96, calibration=300, held_out=100, longest=None, seed=0)
    assert (len(fewer.calibration), len(fewer.held_out)) == (30, 10)
    with pytest.raises(DepthDecayError, match="at least 12"):
        split_prompts(prompts[:11], None, vocabulary=96, calibration=30, held_out=10, longest=None, seed=0)
    with pytest.raises(DepthDecayError, match="40 are longer than 5 tokens"):
        split_prompts(prompts, None, vocabulary=96, calibration=30, held_out=10, longest=5, seed=0)


def test_a_model_with_nan_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(DepthDecayError, match="not finite"):
        Calibration(model, None, token_prompts(), tmp_path, SMALL)


@pytest.mark.parametrize("goal", [{}, {"max_kl": 0.1, "speedup": 1.2}, {"max_kl": 0.0}, {"speedup": 1.0}])
def test_goals_must_be_one_and_sensible(goal: dict[str, float]) -> None:
    with pytest.raises(DepthDecayError):
        Goal(**goal)


def test_texts_that_end_at_different_lengths_are_counted_by_position() -> None:
    stack = LayerStack.of(tiny_model("llama"))
    texts = random_texts(6, 12)
    short = [Continuation(text.prompt, text.tokens[: 5 + i % 2]) for i, text in enumerate(texts[:4])]
    long = Recording.of(stack, texts[4:])
    mixed = Recording(stack, Recording.of(stack, short).batches + long.batches, long.columns)
    plan = decaying_plan()
    measured = Simulator(mixed).measure(plan)
    assert measured.tokens == 2 * 4 + 2 * 5 + 2 * 11
    assert measured.tokens_by_position[:6] == [6, 6, 6, 6, 4, 2]
    alone = [Simulator(Recording.of(stack, [text])).measure(plan) for text in [*short, *texts[4:]]]
    assert sorted(measured.kl_by_prompt) == pytest.approx(sorted(f.kl for f in alone), rel=1e-3)
    assert measured.kl == pytest.approx(sum(f.kl * f.tokens for f in alone) / measured.tokens, rel=1e-3)


def test_prompts_are_fewer_where_memory_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    each = 2.5 * SMALL.new_tokens * model.config.hidden_size * (LAYERS + 1) * 4
    monkeypatch.setattr("depthdecay.calibration.texts.free_bytes", lambda device: each * (8 + 16.5) / 0.7)
    said: list[str] = []
    run = Calibration(model, None, token_prompts(), tmp_path, SMALL, say=said.append)
    assert run.fit.prompts + run.select.prompts == 16
    assert any("states of 16 prompts" in message for message in said)
    # A run that is given again goes on with as many, whatever is free by then.
    monkeypatch.setattr("depthdecay.calibration.texts.free_bytes", lambda device: each * (8 + 20.5) / 0.7)
    said.clear()
    Calibration(model, None, token_prompts(), tmp_path, SMALL, say=said.append)
    assert any("going on" in message for message in said)
    # Also where all had fitted at first.
    monkeypatch.setattr("depthdecay.calibration.texts.free_bytes", lambda device: each * 1000)
    whole = Calibration(model, None, token_prompts(), tmp_path / "whole", SMALL)
    monkeypatch.setattr("depthdecay.calibration.texts.free_bytes", lambda device: each * (8 + 16.5) / 0.7)
    again = Calibration(model, None, token_prompts(), tmp_path / "whole", SMALL)
    assert again.fit.prompts == whole.fit.prompts > run.fit.prompts
    monkeypatch.setattr("depthdecay.calibration.texts.free_bytes", lambda device: each * 5)
    with pytest.raises(DepthDecayError, match="no memory to calibrate in"):
        Calibration(model, None, token_prompts(), tmp_path / "other", SMALL)


class Letters:
    """A tokenizer that knows letters only: enough to tell prompts apart."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return [3 + ord(letter) % 85 for letter in text][:40]


def test_neurons_are_chosen_on_tokens_of_every_batch() -> None:
    parts = [torch.full((count, 3), float(kind)) for kind, count in enumerate((5000, 100, 3000))]
    kinds = _sample(parts)[:, 0]
    assert len(kinds) < 4200
    assert [int((kinds == kind).sum()) for kind in range(3)] == [1366, 100, 1366]


def test_prompts_of_other_kinds_are_mixed_in(tmp_path: Path) -> None:
    model = tiny_model("llama")
    own = ["".join(chr(97 + digit) for digit in prompt) for prompt in np.random.default_rng(1).integers(0, 26, (60, 9))]
    mixed = Calibration(model, Letters(), own, tmp_path / "mixed", SMALL)
    alone = Calibration(model, Letters(), own, tmp_path / "alone", replace(SMALL, variety=0.0))
    assert mixed.elsewhere is not None
    assert alone.elsewhere is None
    others = mixed.fit.prompts - alone.fit.prompts + mixed.select.prompts - alone.select.prompts
    assert others + mixed.elsewhere.prompts == int(0.5 * alone.fit.prompts)
    assert mixed.select.prompts == alone.select.prompts  # other kinds have no say in what is chosen
    # The promise is about the user's own text.
    assert mixed.held_out.prompts == alone.held_out.prompts
    figures = mixed.make(Goal(speedup=1.2)).figures
    assert figures["elsewhere"]["prompts"] == mixed.elsewhere.prompts
    assert alone.make(Goal(speedup=1.2)).figures["elsewhere"] is None


def test_few_prompts_are_answered_more_than_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    few = replace(SMALL, fit_prompts=200)
    plain = Calibration(model, None, token_prompts(24), tmp_path / "plain", replace(few, again=0))
    run = Calibration(model, None, token_prompts(24), tmp_path / "again", few)

    def count(recording: Recording) -> int:
        return sum(batch.inputs.shape[0] for batch in recording.batches)

    assert count(run.fit) == 3 * count(plain.fit)
    assert count(run.select) == count(plain.select)  # choices and promises go by greedy answers, as users get them
    assert count(run.held_out) == count(plain.held_out)
    kept = run.work.read("again")
    assert len(kept) == 2 * count(plain.fit)
    assert len({tuple(tokens) for tokens in kept}) > len(kept) // 2  # each answer another

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("answered again, though the answers lie there")

    monkeypatch.setattr("depthdecay.calibration.texts.continue_prompts", refuse)
    resumed = Calibration(model, None, token_prompts(24), tmp_path / "again", few)
    assert count(resumed.fit) == count(run.fit)
    enough = replace(SMALL, fit_prompts=8)
    monkeypatch.undo()
    assert Calibration(model, None, token_prompts(24), tmp_path / "enough", enough).work.read("again") == []


def test_none_of_the_users_prompts_is_mixed_in_again() -> None:
    lines = resources.files("depthdecay").joinpath("data/variety.txt").read_text(encoding="utf-8").splitlines()
    texts = [line.replace("\\n", "\n") for line in lines]
    settings: Any = {"vocabulary": 90, "longest": None, "seed": 0}
    every = variety(1000, Letters(), besides=[], **settings)
    assert len(every) == len(texts) == len(set(texts))
    assert len(variety(1000, Letters(), besides=texts[:7], **settings)) == len(texts) - 7
    assert variety(1000, None, besides=[], **settings) == []
    assert len(variety(5, Letters(), besides=[], **settings)) == 5


def test_a_plan_promises_only_what_its_texts_reach(tmp_path: Path) -> None:
    """Answers that end early: a horizon beyond them would be a speed-up that no text gets."""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = list(range(3, 20))
    said: list[str] = []
    run = Calibration(model, None, token_prompts(), tmp_path, replace(SMALL, new_tokens=64), say=said.append)
    lengths = sorted(len(row) for batch in run.fit.batches for row in batch.inputs)
    assert lengths
    assert run.settings.new_tokens < 64
    assert any("that is the plan's horizon" in message for message in said)
    plan = run.make(Goal(speedup=1.15)).plan
    assert plan.schedule.to_dict()["horizon"] == run.settings.new_tokens
    deepest = plan.schedule.final_depth
    counts = Simulator(run.held_out).measure(plan).tokens_by_position
    assert sum(count for i, count in enumerate(counts) if plan.depth(i + 1) == deepest) > 0


def test_one_question_in_two_forms_is_one_prompt() -> None:
    class Tokenizer:
        chat_template = None

        def encode(self, text: str) -> list[int]:
            return [3 + ord(letter) % 80 for letter in text]

    texts = [f"hello  number {i}" for i in range(20)]
    doubled: list[Any] = [*texts, *(" ".join(text.split()) for text in texts)]
    made = split_prompts(doubled, Tokenizer(), vocabulary=96, calibration=300, held_out=100, longest=None, seed=0)
    calibration, held_out = {tuple(p) for p in made.calibration}, {tuple(p) for p in made.held_out}
    assert len(calibration) + len(held_out) == 20
    assert not calibration & held_out


def test_few_prompts_are_still_split() -> None:
    few = token_prompts(13)
    made = split_prompts(few, None, vocabulary=96, calibration=8, held_out=1000, longest=None, seed=0)
    assert len(made.calibration) == 8
    assert len(made.held_out) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_maps_with_shared_neurons_are_saved_in_any_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model("llama").to(dtype)
    run = Calibration(model, None, token_prompts(), tmp_path, replace(SMALL, maps=(FitSettings(8, 2, 0.03),)))
    made = run.make(Goal(speedup=1.2))
    made.save(tmp_path)
    again = Simulator(run.held_out).measure(made.plan, Repairs.load(tmp_path / "repairs.safetensors"))
    assert again.kl == pytest.approx(made.figures["repaired"]["kl"], rel=1e-3)


def test_an_older_plan_does_not_stay_beside_new_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    made = Calibration(model, None, token_prompts(), tmp_path, SMALL).make(Goal(speedup=1.2))
    made.save(tmp_path)

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(dd.Plan, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        made.save(tmp_path)
    assert not (tmp_path / "plan.json").exists()


def test_every_reachable_speedup_is_reached_and_no_other() -> None:
    """Against trying every pace of decay: the asked speed-up is met whenever some pace meets it."""
    stack = LayerStack.of(tiny_model("llama"))
    for rank in (1, 6, 12):
        plan = dd.Plan.for_speedup(LAYERS, 1.1, over_tokens=64, drop_order=[3, 4, 6, 1, 5])
        repairs = Repairs(
            {
                depth: tuple(
                    Repair(start, end, torch.ones(rank, 32), torch.ones(32, rank), torch.ones(32))
                    for start, end in runs_of(plan.dropped(depth))
                )
                for depth in range(3, LAYERS)
            }
        )
        costs = Costs(stack, plan, repairs)

        def reached(candidate: dd.Plan, costs: Costs = costs) -> float:
            return float(LAYERS * 64 / sum(costs.in_layers(depth) for depth in candidate.depths(64)))

        paces = [
            reached(dd.Plan.decay(LAYERS, i / 2000, drop_order=[3, 4, 6, 1, 5], horizon=64)) for i in range(1, 2001)
        ]
        for asked in np.linspace(1.02, 2.6, 25).round(3).tolist():
            if asked > max(paces):
                with pytest.raises(DepthDecayError, match="cannot be reached"):
                    plan_at_speedup(plan, stack, asked, 64, repairs)
            else:
                assert reached(plan_at_speedup(plan, stack, asked, 64, repairs)) >= asked


def test_maps_are_floats_beside_packed_weights() -> None:
    model = tiny_model("llama")
    layer = model.model.layers[3]
    layer.self_attn.q_proj.weight = torch.nn.Parameter(
        torch.zeros_like(layer.self_attn.q_proj.weight, dtype=torch.int8), requires_grad=False
    )
    assert all(example.dtype == torch.float32 for example in LayerStack.of(model).examples())


def test_an_engine_follows_a_model_that_changes_its_numbers() -> None:
    model, plan = tiny_model("llama"), decaying_plan()
    engine = dd.Engine(model, plan=plan, repairs=random_repairs(plan, LayerStack.of(model).hidden_size))
    engine.generate([[5, 6, 7]], 8)
    model.to(torch.bfloat16)
    assert len(engine.generate([[5, 6, 7]], 8, eos_token_id=None)[0].token_ids) == 8


@pytest.mark.parametrize("damage", ["no-bias", "no-gate", "flat-up", "long-bias", "float-start"])
def test_damaged_maps_are_refused(damage: str, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    file = random_repairs(decaying_plan(), 32, neurons=2).save(tmp_path / "repairs.safetensors")
    with safe_open(file, "pt") as content:
        about = dict(content.metadata())
        tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    if damage == "no-bias":
        del tensors["0.bias"]
    if damage == "no-gate":
        del tensors["0.gate"]
    if damage == "flat-up":
        tensors["0.up"] = tensors["0.up"].flatten()
    if damage == "long-bias":
        tensors["0.bias"] = torch.zeros(33)
    if damage == "float-start":
        about["depths"] = about["depths"].replace("[[3, ", "[[3.0, ", 1)
    save_file(tensors, file, about)
    with pytest.raises(DepthDecayError, match="cannot be read as repairs"):
        Repairs.load(file)


def test_lines_end_at_newlines_only_and_deep_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\u2028b"}\n{"prompt": "c\u0085d"}\r\n', encoding="utf-8")
    assert read_prompts(file) == ["a\u2028b", "c\u0085d"]
    file.write_text("[" * 100_000)
    with pytest.raises(DepthDecayError, match="line 1"):
        read_prompts(file)
    with pytest.raises(DepthDecayError, match="~nobody"):
        read_prompts("~nobody-of-that-name/prompts.jsonl")
