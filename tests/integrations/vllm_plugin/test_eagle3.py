"""Exported heads in vLLM itself: its own class, loader and drafting, without the plug-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from portable_heads import our_drafts, portable_head, save_with_plan
from typer.testing import CliRunner
from vllm_engines import TINY, Answers, answered, asked, save_tiny_model, stock_engine

import depthdecay as dd
from depthdecay.cli import app
from depthdecay.model.load import load

SOME_TOKENS = torch.arange(3, TINY["vocab_size"], 2)
PROMPT = torch.randint(3, TINY["vocab_size"], (64,), generator=torch.Generator().manual_seed(1)).tolist()
DRAFTS = 3
PLAIN = {"rope_type": "default", "rope_theta": 50000.0}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def drafting_engine(model: str, head: Path, **settings: Any) -> Any:
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": DRAFTS}
    return stock_engine(
        model,
        speculative_config=drafts,
        skip_tokenizer_init=True,
        max_model_len=TINY["max_position_embeddings"],
        **settings,
    )


def draft_network(engine: Any) -> Any:
    return engine.llm_engine.model_executor.driver_worker.worker.model_runner.drafter.model


@pytest.mark.parametrize(("kind", "rope"), [("llama", LLAMA3), ("qwen2", PLAIN), ("qwen3", YARN)])
def test_vllm_drafts_with_the_same_logits(kind: str, rope: dict[str, Any], tmp_path: Path) -> None:
    """A prompt of 64 tokens and three chained drafts. Qwen2's attention has a bias, the head's has none."""
    model = save_tiny_model(tmp_path / "model", kind, rope_parameters=dict(rope))
    network = load(model, device="cpu").model
    head = portable_head(network, SOME_TOKENS)
    ours = our_drafts(head, network, PROMPT, DRAFTS)
    out = dd.export(save_with_plan(head, tmp_path / "plan", TINY["num_hidden_layers"]), tmp_path / "out", model=model)

    engine = drafting_engine(model, out)
    drafter = draft_network(engine)
    assert type(drafter).__name__ == "Eagle3LlamaForCausalLM"
    seen: list[torch.Tensor] = []
    compute_logits = drafter.compute_logits

    def watched(states: torch.Tensor) -> torch.Tensor:
        seen.append(compute_logits(states).clone())
        return seen[-1]

    drafter.compute_logits = watched
    tokens = 24
    said = answered(engine, [PROMPT], asked(tokens, detokenize=False))[0]
    assert said == Answers(model)(PROMPT, dd.Plan.full(TINY["num_hidden_layers"]), tokens)
    assert said[0] == ours.tokens[0]
    for mine, theirs in zip(ours.logits, seen[:DRAFTS], strict=True):
        assert torch.allclose(theirs[0, SOME_TOKENS], mine, atol=1e-4)
        assert int(theirs.isfinite().sum()) == len(SOME_TOKENS)
    assert [int(logits.argmax()) for logits in seen[:DRAFTS]] == ours.tokens[1:]


def test_correct_drafts_are_accepted(tmp_path: Path) -> None:
    """Layers that add nothing and one embedding for all tokens: model and head always predict the same token."""
    folder = save_tiny_model(tmp_path / "random", "llama")
    network = load(folder, device="cpu").model
    with torch.no_grad():
        network.get_input_embeddings().weight.copy_(torch.randn(TINY["hidden_size"]))
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model = str(tmp_path / "model")
    network.save_pretrained(model)
    always = int(network(torch.tensor([PROMPT])).logits[0, -1].argmax())
    head = portable_head(network, torch.tensor(sorted({*SOME_TOKENS.tolist(), always})))
    with torch.no_grad():
        for parameter in (head.fc.weight, head.output.weight, head.down.weight):
            parameter.zero_()
        head.fc.weight[:, : TINY["hidden_size"]] = torch.eye(TINY["hidden_size"])
        head.norm.weight.copy_(network.model.norm.weight)
    out = dd.export(save_with_plan(head, tmp_path / "plan", TINY["num_hidden_layers"]), tmp_path / "out", model=model)

    engine = drafting_engine(model, out, disable_log_stats=False)
    assert answered(engine, [PROMPT], asked(20, detokenize=False)) == [[always] * 20]
    counts = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    drafted, accepted = (counts[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    assert accepted == drafted > 0


def test_the_command_starts_the_stock_model_with_the_plans_drafter(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setenv("DEPTHDECAY_CACHE", str(tmp_path / "cache"))
    network = load(tiny, device="cpu").model
    plan = save_with_plan(portable_head(network, SOME_TOKENS), tmp_path / "plan", TINY["num_hidden_layers"])
    started: list[Any] = []
    monkeypatch.setattr("vllm.entrypoints.cli.serve.ServeSubcommand.cmd", staticmethod(started.append))
    words = ["vllm", "serve", tiny, "--plan", str(plan), "--mode", "lossless", "--window", "4", "--skip-tokenizer-init"]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    started[0].model = started[0].model_tag  # as vLLM's own command does
    config = EngineArgs.from_cli_args(started[0]).create_engine_config()
    assert config.model_config.architecture == "LlamaForCausalLM"
    drafts = config.speculative_config
    assert (drafts.method, drafts.num_speculative_tokens) == ("eagle3", 4)
    assert drafts.draft_model_config.hf_config.draft_vocab_size == len(SOME_TOKENS)
    assert Path(drafts.model).is_relative_to(tmp_path / "cache")
