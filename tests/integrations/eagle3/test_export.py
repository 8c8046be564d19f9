"""Heads for other engines: names, offsets, configuration, and the drafts of an independent implementation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from portable_heads import our_drafts, portable_head, save_with_plan
from safetensors.torch import load_file
from tiny_models import LAYERS, VOCABULARY, tiny_model
from typer.testing import CliRunner

import depthdecay as dd
from depthdecay.cli import app
from depthdecay.errors import DepthDecayError, UnsupportedModelError
from depthdecay.integrations.eagle3.export import cached_export, save_draft
from depthdecay.model.layers import LayerStack
from depthdecay.plan.identity import identity
from depthdecay.speculative.draft_head import HEAD_FILE, PORTABLE_HEAD_FILE, DraftHead, HeadShape

SOME_TOKENS = torch.arange(3, VOCABULARY, 2)
PROMPT = torch.randint(VOCABULARY, (64,), generator=torch.Generator().manual_seed(1)).tolist()
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64},
    **{"short_factor": [1.5] * 4, "long_factor": [1.5] * 4},
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def saved(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def exported(model: Any, head: DraftHead, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    save_draft(head, LayerStack.of(model), folder, "a model")
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


class Reader:
    """EAGLE-3 as documented, from the file and the model's embeddings only; runs a whole text at a time."""

    def __init__(self, tensors: dict[str, torch.Tensor], config: dict[str, Any], embeddings: torch.Tensor) -> None:
        self.tensors, self.config, self.embeddings = tensors, config, embeddings

    def product(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.tensors[f"{name}.weight"].T

    def norm(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return rows * scale * self.tensors[f"{name}.weight"]

    def heads(self, name: str, rows: torch.Tensor, count: int) -> torch.Tensor:
        split = self.product(f"midlayer.self_attn.{name}", rows).view(len(rows), count, self.config["head_dim"])
        return split.repeat_interleave(self.config["num_attention_heads"] // count, dim=1).transpose(0, 1)

    def turned(self, heads: torch.Tensor) -> torch.Tensor:
        half = self.config["head_dim"] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.arange(heads.shape[1])[:, None] * frequencies
        a, b = heads[..., :half], heads[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)

    def states(self, tokens: list[int], before: torch.Tensor) -> torch.Tensor:
        """The states of each token, given the state of the preceding position."""
        seen = self.norm("midlayer.input_layernorm", self.embeddings[tokens])
        both = torch.cat([seen, self.norm("midlayer.hidden_norm", before)], dim=-1)
        count, shared = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        query = self.turned(self.heads("q_proj", both, count))
        key, value = self.turned(self.heads("k_proj", both, shared)), self.heads("v_proj", both, shared)
        scores = query @ key.transpose(1, 2) / math.sqrt(self.config["head_dim"])
        scores += torch.full(scores.shape[1:], -math.inf).triu(1)
        mixed = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        state = before + self.product("midlayer.self_attn.o_proj", mixed)
        normed = self.norm("midlayer.post_attention_layernorm", state)
        gate = torch.nn.functional.silu(self.product("midlayer.mlp.gate_proj", normed))
        return state + self.product("midlayer.mlp.down_proj", gate * self.product("midlayer.mlp.up_proj", normed))

    def drafts(self, prompt: list[int], next_token: int, states: torch.Tensor, count: int) -> Any:
        """The drafted tokens and their logits."""
        tokens, before, logits = [*prompt[1:], next_token], self.product("fc", states), []
        offsets = self.tensors.get("d2t", torch.zeros(self.config["draft_vocab_size"], dtype=torch.long))
        for _ in range(count):
            state = self.states(tokens, before)[-1:]
            logits.append(self.product("lm_head", self.norm("norm", state))[0])
            said = int(logits[-1].argmax())
            tokens.append(said + int(offsets[said]))
            before = torch.cat([before, state])
        return tokens[-count:], logits


@pytest.mark.parametrize("tokens", [SOME_TOKENS, torch.arange(VOCABULARY)], ids=["some tokens", "all tokens"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mixtral"])
def test_an_independent_reader_drafts_the_same(architecture: str, tokens: torch.Tensor, tmp_path: Path) -> None:
    """Qwen2's attention has a bias but the head's has none; full and reduced vocabularies; three chained drafts."""
    model = tiny_model(architecture, rope_parameters={"rope_theta": 777.0, "rope_type": "default"})
    head = portable_head(model, tokens)
    ours = our_drafts(head, model, PROMPT)
    reader = Reader(*exported(model, head, tmp_path / "out"), model.get_input_embeddings().weight.detach())
    said, logits = reader.drafts(PROMPT, ours.tokens[0], ours.states, 3)
    assert said == ours.tokens[1:]
    for mine, theirs in zip(ours.logits, logits, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4)


def test_names_shapes_and_offsets(tmp_path: Path) -> None:
    model = tiny_model("llama")
    tensors, config = exported(model, portable_head(model, SOME_TOKENS), tmp_path / "out")
    layer = {
        **{"input_layernorm": (32,), "hidden_norm": (32,), "post_attention_layernorm": (32,)},
        **{"self_attn.q_proj": (32, 64), "self_attn.k_proj": (16, 64), "self_attn.v_proj": (16, 64)},
        **{"self_attn.o_proj": (32, 32), "mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32), "mlp.down_proj": (32, 64)},
    }
    rest = {"fc": (32, 96), "norm": (32,), "lm_head": (len(SOME_TOKENS), 32)}
    shapes = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {f"{name}.weight": shape for name, shape in rest.items()} | {"d2t": (len(SOME_TOKENS),)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    assert tensors["d2t"].dtype == torch.int64
    assert (torch.arange(len(SOME_TOKENS)) + tensors["d2t"]).tolist() == SOME_TOKENS.tolist()
    assert torch.equal(tensors["lm_head.weight"], model.lm_head.weight[SOME_TOKENS])
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert (config["vocab_size"], config["draft_vocab_size"]) == (VOCABULARY, len(SOME_TOKENS))
    assert config["max_position_embeddings"] == 256
    assert config["attention_bias"] is False
    assert not any("layer_ids" in name or name == "eagle_config" for name in config)  # engines use their defaults


def test_weights_are_in_the_models_precision(tmp_path: Path) -> None:
    loaded = dd.load(saved(tiny_model("llama"), tmp_path / "model"), device="cpu", dtype="bf16")
    tensors, config = exported(loaded.model, portable_head(loaded.model, SOME_TOKENS), tmp_path / "out")
    assert config["torch_dtype"] == "bfloat16"
    assert {tensor.dtype for name, tensor in tensors.items() if name != "d2t"} == {torch.bfloat16}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 50000.0},
        {"rope_type": "linear", "rope_theta": 50000.0, "factor": 2.0},
        LLAMA3,
        YARN,
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_embeddings_are_told_in_both_forms(rope: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model("llama", rope_parameters=dict(rope))
    _, config = exported(model, portable_head(model, SOME_TOKENS), tmp_path / "out")
    assert config["rope_parameters"] == rope
    assert config["rope_theta"] == rope["rope_theta"]
    older = {name: value for name, value in rope.items() if name != "rope_theta"}
    if rope["rope_type"] == "default":
        assert config["rope_scaling"] is None
    else:
        assert config["rope_scaling"] == older


@pytest.mark.parametrize("architecture", ["gpt_neox", "gpt2"])
def test_a_model_that_turns_no_whole_heads_has_a_head_with_plain_frequencies(architecture: str, tmp_path: Path) -> None:
    """GPT-NeoX rotates a quarter of each head, GPT-2 nothing: their draft heads rotate all, at default frequencies."""
    model = tiny_model(architecture)
    _, config = exported(model, portable_head(model, SOME_TOKENS), tmp_path / "out")
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("gemma2", {}, "scales its embeddings"),
        ("llama", {"rope_parameters": {**YARN, "attention_factor": 2.0}}, r"LlamaForCausalLM \(yarn\) cannot be"),
        ("phi3", {"rope_parameters": LONGROPE}, r"\(longrope\) cannot be"),
    ],
)
def test_what_engines_would_compute_otherwise_is_refused(
    architecture: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = tiny_model(architecture, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        exported(model, portable_head(model, SOME_TOKENS), tmp_path / "out")
    assert not (tmp_path / "out").exists()


class TestCommand:
    def test_a_plans_own_head(self, tmp_path: Path) -> None:
        model = tiny_model("llama")
        head = portable_head(model, SOME_TOKENS)
        plan = save_with_plan(head, tmp_path / "plan", LAYERS, model=identity(model))
        where = saved(model, tmp_path / "model")
        words = ["export", "--format", "eagle3", str(plan), str(tmp_path / "out"), "--model", where]
        for _ in range(2):  # an earlier export is replaced
            told = CliRunner().invoke(app, words)
            assert told.exit_code == 0, told.output
            assert str(tmp_path / "out") in told.stdout.replace("\n", "")
        assert {file.name for file in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors", "README.md"}
        assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["fc.weight"], head.fc.weight)
        assert "--speculative-config" in (tmp_path / "out" / "README.md").read_text()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "plan"]

    def test_the_head_for_other_engines_comes_first(self, tmp_path: Path) -> None:
        model = tiny_model("llama")
        plan = save_with_plan(portable_head(model, SOME_TOKENS), tmp_path / "plan", LAYERS)
        other = portable_head(model, SOME_TOKENS, seed=7)
        other.save(plan / PORTABLE_HEAD_FILE)
        out = dd.export(plan, tmp_path / "out", model=saved(model, tmp_path / "model"))
        assert torch.equal(load_file(out / "model.safetensors")["fc.weight"], other.fc.weight)

    def test_a_head_beside_a_plan_for_lossless_mode(self, tmp_path: Path) -> None:
        model = tiny_model("llama")
        dd.Plan.full(LAYERS).save(tmp_path / "plan")
        head = portable_head(model, SOME_TOKENS)
        save_with_plan(head, tmp_path / "plan" / "lossless", LAYERS, PORTABLE_HEAD_FILE)
        out = dd.export(tmp_path / "plan", tmp_path / "out", model=saved(model, tmp_path / "model"))
        assert torch.equal(load_file(out / "model.safetensors")["fc.weight"], head.fc.weight)

    @pytest.mark.parametrize("shape", [{"first_layers": 2}, {"states": (0, 3, 7)}])
    def test_a_head_that_only_we_can_run_is_refused(self, shape: dict[str, Any], tmp_path: Path) -> None:
        stack = LayerStack.of(tiny_model("llama"))
        head = DraftHead.new(stack, HeadShape.of(stack, **shape), SOME_TOKENS)
        plan = save_with_plan(head, tmp_path / "plan", LAYERS)
        with pytest.raises(DepthDecayError, match=r"other engines do not; depthdecay calibrate --lossless"):
            dd.export(plan, tmp_path / "out")

    def test_other_refusals(self, tmp_path: Path) -> None:
        model = tiny_model("llama")
        where, plan = (
            saved(model, tmp_path / "model"),
            save_with_plan(portable_head(model, SOME_TOKENS), tmp_path / "plan", LAYERS),
        )
        bare = dd.Plan.full(LAYERS).save(tmp_path / "bare" / "plan.json")
        few = save_with_plan(portable_head(model, SOME_TOKENS), tmp_path / "few", 6)
        for words, message in (
            ([bare, "out"], "no learned drafter to export; depthdecay calibrate --lossless"),
            ([few, "out"], "6 layers"),
            ([plan, plan], "contains draft_head.safetensors; give a new or empty folder"),
            ([plan, where], "give a new or empty folder"),
            ([plan, bare], "which is a file"),
            ([plan, "out", "--format", "gguf"], "--format is 'gguf'; expected eagle3"),
            ([plan, "out", "--model", "smollm2-135m"], "8 layers"),
        ):
            words = [str(tmp_path / "out") if word == "out" else str(word) for word in words]
            told = CliRunner().invoke(app, ["export", *(words if "--model" in words else [*words, "--model", where])])
            assert told.exit_code == 2, told.output
            assert message in told.stderr, told.stderr
        assert not (tmp_path / "out").exists()
        assert {file.name for file in plan.iterdir()} == {"plan.json", HEAD_FILE}

    def test_weights_without_our_mark_stay(self, tmp_path: Path) -> None:
        """Someone else's head, with the same three file names."""
        from safetensors.torch import save_file

        model = tiny_model("llama")
        plan = save_with_plan(portable_head(model, SOME_TOKENS), tmp_path / "plan", LAYERS)
        (tmp_path / "out").mkdir()
        save_file({"fc.weight": torch.zeros(1)}, tmp_path / "out" / "model.safetensors")
        with pytest.raises(DepthDecayError, match="give a new or empty folder"):
            dd.export(plan, tmp_path / "out", model=saved(model, tmp_path / "model"))
        assert load_file(tmp_path / "out" / "model.safetensors")["fc.weight"].tolist() == [0]


class TestCache:
    """What `depthdecay vllm serve --mode lossless` passes to vLLM."""

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DEPTHDECAY_CACHE", str(tmp_path / "cache"))

    def test_a_model_is_loaded_once_for_its_drafter(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_model("llama")
        where = saved(model, tmp_path / "model")
        plan = dd.Plan.load(save_with_plan(portable_head(model, SOME_TOKENS), tmp_path / "plan", LAYERS))
        first = cached_export(plan, where)
        assert first.is_relative_to(tmp_path / "cache")
        assert json.loads((first / "config.json").read_text())["draft_vocab_size"] == len(SOME_TOKENS)
        with monkeypatch.context() as patched:
            patched.setattr("depthdecay.integrations.eagle3.export.load", lambda *_, **__: pytest.fail("loaded again"))
            assert cached_export(plan, where) == first
        portable_head(model, SOME_TOKENS, seed=7).save(tmp_path / "plan" / PORTABLE_HEAD_FILE)
        assert cached_export(plan, where) != first

    def test_other_weights_in_the_same_place_are_exported_anew(self, tmp_path: Path) -> None:
        model = tiny_model("llama")
        plan = dd.Plan.load(save_with_plan(portable_head(model, SOME_TOKENS), tmp_path / "plan", LAYERS))
        first = cached_export(plan, saved(model, tmp_path / "model"))
        other = tiny_model("llama", seed=5)
        second = cached_export(plan, saved(other, tmp_path / "model"))
        assert first != second
        rows = load_file(second / "model.safetensors")["lm_head.weight"]
        assert torch.equal(rows, other.lm_head.weight[SOME_TOKENS])
