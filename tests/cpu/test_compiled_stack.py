"""The CPU's compiled pass compared with the models' own forward, unquantized and quantized."""

from __future__ import annotations

import copy
import gc
import json
import warnings
import weakref
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from draft_heads import random_head
from safetensors import SafetensorError
from tiny_models import ARCHITECTURES, LAYERS, PROMPTS, tiny_model

import depthdecay as dd
from depthdecay.cpu import choose_stack as opening
from depthdecay.cpu import kernel_library as library
from depthdecay.cpu import packed_weights as weights
from depthdecay.cpu import quantized_blocks as blocks
from depthdecay.cpu.choose_stack import open_stack
from depthdecay.cpu.compiled_rows import FEW_TOKENS
from depthdecay.cpu.compiled_stack import CompiledLayerStack
from depthdecay.cpu.dequantized_stack import widen_in_place
from depthdecay.cpu.supported_models import OtherForm, form_of
from depthdecay.engine.request import prepare_request
from depthdecay.errors import DepthDecayError
from depthdecay.model import load as models
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repair, Repairs
from depthdecay.model.weights_origin import WeightsOrigin
from depthdecay.plan.ladder import runs_of
from depthdecay.runners.block_runner import BlockRunner
from depthdecay.runners.contract import Part
from depthdecay.runners.kv_blocks import BLOCK, KVBlocks

PLAIN = ("llama", "mistral", "qwen2", "qwen3")  # architectures that the compiled pass supports
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}


def logits_of(stack: LayerStack, ids: list[int]) -> torch.Tensor:
    """The logits after every token, from the fastest way to run a pass."""
    rows = KVBlocks.of_rows(stack.kept_shapes(), [[len(ids)] * LAYERS])
    part = Part(0, 0, ids, LAYERS, dd.Plan.full(LAYERS), wanted=len(ids))
    return BlockRunner(stack, rows, Repairs()).run([part]).logits


def logits_in_passes(stack: LayerStack, ids: list[int], widths: list[int]) -> torch.Tensor:
    """The same from passes of these widths, one after the other, as far as there are tokens."""
    rows = KVBlocks.of_rows(stack.kept_shapes(), [[len(ids)] * LAYERS])
    runner = BlockRunner(stack, rows, Repairs())
    found: list[torch.Tensor] = []
    at = 0
    for width in widths:
        tokens = ids[at : at + width]
        if tokens:
            found.append(runner.run([Part(0, at, tokens, LAYERS, dd.Plan.full(LAYERS), wanted=len(tokens))]).logits)
        at += len(tokens)
    return torch.cat(found)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has its own cache of quantized weights. The compiled library is shared: building takes seconds."""
    monkeypatch.setenv("DEPTHDECAY_CACHE", str(tmp_path_factory.mktemp("cache")))
    try:
        library.library()
    except library.Unavailable as reason:
        pytest.skip(f"no compiled pass here: {reason}")


def rounded_copy(model: Any, setting: str, origin: WeightsOrigin | None = None) -> Any:
    """The same model with dequantized weights: the reference for quantized passes."""
    twin = copy.deepcopy(model)
    form = form_of(LayerStack.of(twin))
    # The twin's head is untied from its embedding, which is not quantized.
    form.head.weight = torch.nn.Parameter(form.head.weight.detach().clone())
    for name, weight in weights.widened_weights(form, setting, origin).items():
        dict(form.matrices())[name].weight.data.copy_(weight)
    return twin


def tokens(engine: dd.Engine, prompts: list[list[int]], mode: str = "full", count: int = 16) -> list[list[int]]:
    return [result.token_ids for result in engine.generate(prompts, count, mode=mode, **GREEDY)]


@pytest.mark.parametrize("architecture", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_says_what_the_model_says(architecture: str, dtype: torch.dtype) -> None:
    stack = open_stack(tiny_model(architecture).to(dtype), fast=True)
    assert isinstance(stack, CompiledLayerStack)
    assert opening._difference(stack) < (1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("architecture", PLAIN)
@pytest.mark.parametrize("count", [1, 3])
def test_greedy_text_in_full_precision_is_that_of_the_plain_path(architecture: str, count: int) -> None:
    model = tiny_model(architecture)
    fast, plain = dd.Engine(model), dd.Engine(model, fast=False)
    assert isinstance(fast.stack, CompiledLayerStack)
    assert type(plain.stack) is LayerStack
    assert tokens(fast, PROMPTS[:count]) == tokens(plain, PROMPTS[:count])
    assert tokens(fast, PROMPTS[:1], "lossless", 40) == tokens(plain, PROMPTS[:1], "full", 40)


@pytest.mark.parametrize("architecture", PLAIN)
@pytest.mark.parametrize("setting", ["int8", "int4"])
def test_few_bits_equal_their_widened_reference(architecture: str, setting: str) -> None:
    """Logits within 0.1% of the largest: float32 sums in a different order."""
    model = tiny_model(architecture)
    stack = open_stack(model, quantize=setting)
    reference = LayerStack.of(rounded_copy(model, setting))
    said = [logits_of(each, PROMPTS[0]) for each in (stack, reference)]
    assert stack.rounded.matrices  # type: ignore[attr-defined]
    assert (said[0] - said[1]).abs().max() < 1e-3 * said[1].abs().max()


@pytest.mark.parametrize("setting", ["int8", "int4"])
@pytest.mark.parametrize("count", [1, 3])
def test_few_bits_in_every_mode(setting: str, count: int) -> None:
    model = tiny_model("qwen3")
    plan = dd.Plan.decay(LAYERS, "0.95")
    ours = dd.Engine(model, plan=plan, quantize=setting)
    reference = dd.Engine(rounded_copy(model, setting), plan=plan, fast=False)
    for mode in ("full", "decay", "lossless"):
        assert tokens(ours, PROMPTS[:count], mode) == tokens(reference, PROMPTS[:count], mode)


@pytest.mark.parametrize("architecture", PLAIN)
@pytest.mark.parametrize("setting", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_have_the_same_bits_in_passes_of_any_width(architecture: str, setting: str, dtype: torch.dtype) -> None:
    """Drafts and neighbours change no answer, because they change no bit."""
    stack = open_stack(tiny_model(architecture).to(dtype), quantize=setting, fast=True)
    assert isinstance(stack, CompiledLayerStack)
    ids = [(7 * place) % 61 + 1 for place in range(48)]
    longest = len(ids) if stack.is_rounded else FEW_TOKENS[dtype]
    expected = logits_in_passes(stack, ids, [1] * len(ids))
    random = Random(0)
    mixed = [random.randint(1, 9) for _ in ids]
    for widths in [[width] * len(ids) for width in (2, 3, 4, 5, 7, 8, 9, 15, 16, longest)] + [mixed]:
        assert torch.equal(logits_in_passes(stack, ids, widths), expected), widths[0]


@pytest.mark.parametrize("token", [-1, 97])
def test_a_token_without_an_embedding_is_an_error(token: int) -> None:
    with pytest.raises(IndexError, match="not below 97"):
        logits_of(open_stack(tiny_model("llama"), fast=True), [5, token])


@pytest.mark.parametrize("setting", ["int8", "int4"])
def test_logits_have_the_same_bits_in_any_company(setting: str) -> None:
    stack = open_stack(tiny_model("qwen3"), quantize=setting)
    plan = dd.Plan.full(LAYERS)
    rows = KVBlocks.of_rows(stack.kept_shapes(), [[len(prompt) + 1] * LAYERS for prompt in PROMPTS])
    runner = BlockRunner(stack, rows, Repairs())
    parts = [Part(slot, 0, prompt, LAYERS, plan) for slot, prompt in enumerate(PROMPTS)]
    together = torch.cat([runner.run(parts[1:]).logits, runner.run(parts[:1]).logits])
    alone = [logits_of(stack, prompt)[-1:] for prompt in [*PROMPTS[1:], PROMPTS[0]]]
    assert torch.equal(together, torch.cat(alone))
    assert runner.inexact is None


def test_results_say_that_they_are_exact() -> None:
    model = tiny_model("llama")
    for quantize, prompts in (("none", PROMPTS[:1]), ("int4", PROMPTS[:1]), ("int4", PROMPTS)):
        engine = dd.Engine(model, quantize=quantize)
        for mode in ("full", "lossless"):
            results = engine.generate(prompts, 4, mode=mode, **GREEDY)
            assert [(result.exact, result.inexact_because) for result in results] == [(True, None)] * len(prompts)
    (first, _, _) = dd.Engine(model).generate(PROMPTS, 4, mode="lossless", **GREEDY)
    assert first.exact is None  # a long pass over several texts would be torch's


@pytest.mark.parametrize("setting", ["int8", "int4"])
@pytest.mark.parametrize("architecture", PLAIN)
def test_rows_of_a_batch_say_what_they_say_alone(architecture: str, setting: str) -> None:
    from batches import SMALL, run_dry, submit

    from depthdecay.batching.batcher import Batcher

    model = tiny_model(architecture)
    plan = dd.Plan.decay(LAYERS, "0.95")
    engine = dd.Engine(model, plan=plan, quantize=setting)
    batcher = Batcher(engine, SMALL)
    assert batcher.runner.compiled is not None
    assert batcher.runner.compiled.takes(10 * FEW_TOKENS[torch.float32])  # only this pass reads quantized weights
    assert batcher.stack.layer_bytes() < LayerStack.of(model).layer_bytes()
    expected, got = {}, {}
    for place, prompt in enumerate(PROMPTS):
        mode = "decay" if place % 2 else "full"
        number = submit(batcher, prompt, 16, plan if place % 2 else None, mode, **GREEDY)
        expected[number], got[number] = tokens(engine, [prompt], mode)[0], []
        for update in batcher.step():
            got[update.id].append(update.token)
    for update in run_dry(batcher):
        assert update.error is None
        got[update.id].append(update.token)
    assert got == expected
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_layers_are_counted_where_they_run() -> None:
    plan = dd.Plan.constant(LAYERS, 5, drop_order=[3, 5, 2])
    result = dd.Engine(tiny_model(), plan=plan).generate(PROMPTS[:1], 6, mode="decay", **GREEDY)[0]
    assert result.depths == [LAYERS, 5, 5, 5, 5, 5]


@pytest.mark.parametrize("neurons", [0, 24])
def test_maps_run_in_the_place_of_layers(neurons: int) -> None:
    model, generator = tiny_model(), torch.Generator().manual_seed(3)
    sizes: list[tuple[int, ...]] = [(8, 32), (32, 8), (32,)]
    sizes += [(neurons, 32), (neurons, 32), (32, neurons)] if neurons else []
    plan = dd.Plan.constant(LAYERS, 6, drop_order=[3, 4])
    maps = Repair(3, 5, *(torch.randn(size, generator=generator) for size in sizes))
    repairs = Repairs({6: (maps,)})
    fast, plain = (dd.Engine(model, plan=plan, repairs=repairs, fast=fast) for fast in (True, False))
    bare = dd.Engine(model, plan=plan, fast=False)
    said = tokens(fast, PROMPTS[:1], "decay")
    assert said == tokens(plain, PROMPTS[:1], "decay")
    assert said != tokens(bare, PROMPTS[:1], "decay")


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - set(PLAIN)))
def test_other_forms_keep_the_plain_path_and_say_why(architecture: str) -> None:
    model = tiny_model(architecture)
    assert type(open_stack(model)) is LayerStack
    with pytest.warns(UserWarning, match="runs uncompiled and in its own precision: "):
        assert type(open_stack(model, quantize="int4")) is LayerStack


def test_a_model_that_only_looks_plain_is_found_out() -> None:
    model = tiny_model()
    norm = type(model.model.norm)
    model.model.norm.__class__ = type("OtherRMSNorm", (norm,), {"forward": lambda self, x: 3 * norm.forward(self, x)})
    assert type(open_stack(model)) is LayerStack


def test_somebodys_hooks_are_called() -> None:
    model, called = tiny_model(), []
    engine = dd.Engine(model)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *args: called.append(1))
    engine.generate(PROMPTS[:1], 4, mode="full", **GREEDY)
    assert len(called) == 4
    handle.remove()


def test_changed_weights_are_seen_by_the_next_text() -> None:
    model = tiny_model()
    engine = dd.Engine(model)
    before = tokens(engine, PROMPTS[:1])
    with torch.no_grad():
        model.model.layers[4].mlp.up_proj.weight.neg_()
    assert tokens(engine, PROMPTS[:1]) == tokens(dd.Engine(model, fast=False), PROMPTS[:1]) != before


def test_a_text_that_has_begun_keeps_the_weights_it_began_with() -> None:
    """Another request reads the model again, and the float32 copies of norms would be freed."""
    model = tiny_model().bfloat16()
    engine = dd.Engine(model, draft_head=random_head(model))
    request = prepare_request(engine, PROMPTS[:1], 12, {"do_sample": False, "eos_token_id": None})
    (result,) = results = engine._new_results(request, "lossless")
    begun = engine._decoded(request, results)
    next(begun)
    alive = engine.stack.weights.alive  # type: ignore[attr-defined]
    kept = [weakref.ref(tensor) for tensor in alive if isinstance(tensor, torch.Tensor)]
    del alive
    engine.generate(PROMPTS[1:2], 2, do_sample=False)
    gc.collect()
    assert all(tensor() is not None for tensor in kept)
    for _ in begun:
        pass
    assert result.token_ids == engine.generate(PROMPTS[:1], 12, mode="full", **GREEDY)[0].token_ids


def test_an_engine_tells_that_weights_are_rounded() -> None:
    said: list[str] = []
    dd.Engine(tiny_model(), quantize="int8", progress=said.append)
    assert "quantizing weights to int8 (once) …" in said


def test_matrices_that_cannot_be_rounded_are_left_and_listed() -> None:
    model = tiny_model(intermediate_size=40)
    stack = open_stack(model, quantize="int8")
    assert stack.rounded.left == tuple(f"{layer}.down" for layer in range(LAYERS))  # type: ignore[attr-defined]
    assert tokens(dd.Engine(model, quantize="int8"), PROMPTS[:1]) == tokens(
        dd.Engine(rounded_copy(model, "int8"), fast=False), PROMPTS[:1]
    )


def test_bytes_are_those_that_are_read() -> None:
    model = tiny_model(hidden_size=64, intermediate_size=128, vocab_size=96)
    plain, eight, four = (open_stack(model, quantize=setting) for setting in (None, "int8", "int4"))
    numbers = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128
    norms = 2 * 64 * 4
    assert plain.layer_bytes()[0] == 4 * numbers + norms
    assert eight.layer_bytes()[0] == numbers * 34 // 32 + norms
    assert four.layer_bytes()[0] == numbers * 20 // 32 + norms
    assert eight.head_bytes() == four.head_bytes() == 96 * 64 * 34 // 32


def test_without_a_compiler_it_runs_eagerly_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(say: object) -> None:
        raise library.Unavailable("there is no C++ compiler (c++, g++ or clang++)")

    model = tiny_model()
    expected = {setting: tokens(dd.Engine(model, quantize=setting), PROMPTS[:1]) for setting in ("none", "int4")}
    monkeypatch.setattr(library, "library", missing)
    opening._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        slow = dd.Engine(model, quantize="int4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = dd.Engine(model)
    assert tokens(slow, PROMPTS[:1]) == expected["int4"] != expected["none"]
    assert tokens(plain, PROMPTS[:1]) == expected["none"]


def test_wrong_settings_are_refused_in_one_line() -> None:
    with pytest.raises(DepthDecayError, match="expected one of none, int8, int4"):
        dd.Engine(tiny_model(), quantize="int2")


class TestBlocks:
    @pytest.mark.parametrize(("rounding", "tolerance"), [(blocks.rounded_to_8, 1 / 250), (blocks.rounded_to_4, 1 / 14)])
    def test_rounding_stays_within_half_a_step(self, rounding: Any, tolerance: float) -> None:
        weight = torch.randn(21, 96, generator=torch.Generator().manual_seed(1))
        difference = (rounding(weight).widened() - weight).abs().reshape(21, 3, 32).amax(-1)
        spans = weight.reshape(21, 3, 32).amax(-1) - weight.reshape(21, 3, 32).amin(-1)
        assert (difference <= 2.2 * tolerance * spans).all()

    def test_zeros_stay_zeros(self) -> None:
        for rounding in (blocks.rounded_to_8, blocks.rounded_to_4):
            assert not rounding(torch.zeros(3, 64)).widened().any()

    @pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
    def test_blocks_of_a_file_are_kept_exactly(self, kind: str) -> None:
        gguf = pytest.importorskip("gguf")
        weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)).numpy()
        number = getattr(gguf.GGMLQuantizationType, kind)
        raw = gguf.quantize(weight, number)

        class Tensor:
            tensor_type, shape, data = number, (64, 16), raw

        found = blocks.from_gguf(Tensor())
        assert found is not None
        assert torch.equal(found.widened(), torch.from_numpy(gguf.dequantize(raw, number)))


class TestStore:
    def test_rounded_once_then_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, origin = tiny_model(), WeightsOrigin("a-key")
        first = tokens(dd.Engine(model, quantize="int4", origin=origin), PROMPTS[:1])

        def again(*args: Any) -> None:
            raise AssertionError("rounded again")

        monkeypatch.setattr(weights, "_make", again)
        assert tokens(dd.Engine(model, quantize="int4", origin=origin), PROMPTS[:1]) == first

    def test_other_weights_under_the_same_key_are_rounded_anew(self) -> None:
        origin = WeightsOrigin("a-key")
        dd.Engine(tiny_model(), quantize="int4", origin=origin)
        other = tiny_model(seed=5)
        kept = tokens(dd.Engine(other, quantize="int4", origin=origin), PROMPTS[:1])
        assert kept == tokens(dd.Engine(other, quantize="int4"), PROMPTS[:1])

    def test_a_damaged_file_is_made_anew(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DEPTHDECAY_CACHE", str(tmp_path))
        model, origin = tiny_model(), WeightsOrigin("a-key")
        first = tokens(dd.Engine(model, quantize="int8", origin=origin), PROMPTS[:1])
        (file,) = (tmp_path / "cpu").glob("*.safetensors")
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[-64] ^= 1  # within a matrix: the header is at the beginning
        for damaged in (b"", content[: len(content) // 2], b"x" * len(content), bytes(flipped)):
            file.unlink()  # a new file: an engine that is not yet collected may still use the old one's weights
            file.write_bytes(damaged)
            assert tokens(dd.Engine(model, quantize="int8", origin=origin), PROMPTS[:1]) == first
            assert file.read_bytes() == content

    def test_a_full_disk_is_no_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: Any) -> None:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

        monkeypatch.setenv("DEPTHDECAY_CACHE", str(tmp_path))
        monkeypatch.setattr("safetensors.torch.save_file", full)
        assert open_stack(tiny_model(), quantize="int8", origin=WeightsOrigin("a-key")).rounded  # type: ignore[attr-defined]
        assert not list((tmp_path / "cpu").iterdir())

    def test_a_folder_that_cannot_be_written_is_no_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "taken").write_text("")
        monkeypatch.setenv("DEPTHDECAY_CACHE", str(tmp_path / "taken"))
        assert open_stack(tiny_model(), quantize="int8", origin=WeightsOrigin("a-key")).rounded  # type: ignore[attr-defined]


class TestLibrary:
    def test_a_broken_compiler_is_told_in_a_line(self, tmp_path: Path) -> None:
        said = "the compiler /bin/false cannot compile the pass: it exited with code 1 and no output"
        with pytest.raises(library.Unavailable, match=said):
            library.build("/bin/false", tmp_path / "pass.so")
        assert not list(tmp_path.iterdir())

    def test_a_file_that_is_no_library_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "pass.so"
        file.write_bytes(b"nothing")
        with pytest.raises(library.Unavailable, match="cannot be loaded"):
            library.Library(file)

    def test_a_library_that_was_cut_short_is_built_anew(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It must not be loaded to find out: a truncated library ends the process with a signal."""
        monkeypatch.setenv("DEPTHDECAY_CACHE", str(tmp_path))
        monkeypatch.setattr(library, "_TUNED", ((),))
        monkeypatch.setattr(library, "_FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in library._FLAGS))
        said: list[str] = []
        library._found_or_built(said.append)
        assert said == ["compiling the code for this CPU (once) …"]
        (file,) = (tmp_path / "kernels").glob("*.so")
        content = file.read_bytes()
        loaded: list[int] = []
        monkeypatch.setattr(library, "Library", lambda file: loaded.append(file.stat().st_size))
        for damaged in (content[: len(content) // 2], content[:-4096] + bytes(4096)):
            file.unlink()  # a new file: this process has the old one loaded; truncated, it would crash at exit
            file.write_bytes(damaged)
            library._found_or_built(said.append)
        assert loaded == [len(content)] * 2
        assert len(said) == 3
        library._found_or_built(said.append)
        assert len(said) == 3  # a cached library is not compiled again

    def test_no_compiler(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        with pytest.raises(library.Unavailable, match="no C\\+\\+ compiler"):
            library.find_compiler()

    def test_threads_do_not_change_what_is_said(self) -> None:
        from depthdecay.cpu.threads import set_threads

        model = tiny_model()
        said = []
        try:
            for count in (1, 2, 3):
                set_threads(count)
                said.append(tokens(dd.Engine(model, quantize="int4"), PROMPTS))
        finally:
            set_threads(None)
            torch.set_num_threads(1)
        assert said[0] == said[1] == said[2]


@pytest.mark.usefixtures("cache")
def test_the_embedded_models_own_blocks_are_the_model(monkeypatch: pytest.MonkeyPatch, converted_cache: Path) -> None:
    monkeypatch.setenv("DEPTHDECAY_CACHE", str(converted_cache))
    loaded = models.load(device="cpu")
    stack = open_stack(loaded.model, quantize="int4", origin=loaded.origin)
    assert stack.rounded.is_exact  # type: ignore[attr-defined]
    assert len(stack.rounded.matrices) == 7 * 30 + 1  # type: ignore[attr-defined]
    prompt = [1, 4093, 198, 1780, 314, 260]
    fast = dd.Engine(loaded.model, quantize="int4", origin=loaded.origin)
    assert tokens(fast, [prompt], count=12) == tokens(dd.Engine(loaded.model, fast=False), [prompt], count=12)
    assert json.dumps(stack.rounded.describe())  # type: ignore[attr-defined]


def test_calibration_sees_the_rounded_weights() -> None:
    model = tiny_model()
    expected = tokens(dd.Engine(model, quantize="int4"), PROMPTS[:1])
    assert tokens(dd.Engine(model), PROMPTS[:1]) != expected
    widen_in_place(model, "int4")
    assert tokens(dd.Engine(model), PROMPTS[:1]) == expected


def test_form_refuses_by_name_what_it_finds() -> None:
    with pytest.raises(OtherForm, match="layer 0"):
        form_of(LayerStack.of(tiny_model("olmo2")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("neurons", [0, 8])
def test_a_compiled_pass_over_a_batch_is_the_eager_one(neurons: int, dtype: torch.dtype) -> None:
    """Rows at several depths with maps, one with several tokens, in blocks that other rows used before."""
    from batches import SMALL, run_dry, submit

    from depthdecay.batching.batcher import Batcher

    plan = dd.Plan.decay(LAYERS, "0.93")
    model = tiny_model("mistral").to(dtype)  # has a sliding window
    hidden = model.config.hidden_size
    torch.manual_seed(0)
    maps = {}
    for depth in range(4, LAYERS):
        shapes = [(4, hidden), (hidden, 4), (hidden,), *([(neurons, hidden)] * 2 + [(hidden, neurons)]) * bool(neurons)]
        maps[depth] = tuple(
            Repair(start, end, *(torch.randn(shape) * 0.1 for shape in shapes))
            for start, end in runs_of(plan.dropped(depth))
        )
    batcher = Batcher(dd.Engine(model, plan=plan, repairs=Repairs(maps)), SMALL)
    assert batcher.runner.compiled is not None
    assert not batcher.runner.compiled.takes(FEW_TOKENS[dtype] + 1)
    for prompt in PROMPTS:
        submit(batcher, prompt * 4, 6, plan, "decay", **GREEDY)
    list(run_dry(batcher))
    for place, prompt in enumerate(PROMPTS):
        submit(batcher, prompt * 3, 30, plan if place else None, "decay" if place else "full", **GREEDY)
        while len(batcher.rows) <= place or batcher.rows[-1].index < 3:
            batcher.step()
    parts = []
    for row in sorted(batcher.rows, key=lambda row: -row.depth):
        parts.append(Part(row.slot, row.length, row.next_tokens(), row.depth, row.plan))
        batcher.blocks.extend(row.slot, row.plan.layers(row.depth), row.length + 1)
    slot = batcher.blocks.enter(batcher.blocks.needs(dd.Plan.full(LAYERS), 20, 1)[LAYERS])
    batcher.blocks.extend(slot, range(LAYERS), 20)
    parts.insert(0, Part(slot, 0, list(range(5, 10)), LAYERS, dd.Plan.full(LAYERS), wanted=3))
    assert len({part.depth for part in parts}) >= 3
    said = batcher.runner.compiled.run(parts)
    stores = [(store.keys.clone(), store.values.clone()) for store in batcher.blocks.stores]
    eager = batcher.runner.forward.run(parts)
    logits, expected = said.logits, eager.logits
    assert said.tokens_run == eager.tokens_run
    tolerance = 1e-3 if dtype == torch.float32 else 0.1  # the eager pass rounds to 16 bits everywhere
    assert (logits - expected.float()).abs().max() < tolerance * expected.float().abs().max()
    own = torch.tensor([int(batcher.blocks.table[0, part.slot, 0]) * BLOCK for part in parts])  # their first positions
    for store, (keys, values) in zip(batcher.blocks.stores, stores, strict=True):
        for now, before in (
            (store.keys[own].float(), keys[own].float()),
            (store.values[own].float(), values[own].float()),
        ):
            assert (now - before).abs().max() < tolerance * now.abs().max()
