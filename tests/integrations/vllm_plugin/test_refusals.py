"""What cannot work with depth decay is refused, when the server starts or the request arrives, with what to do."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_engines import asked, our_engine, stock_engine

from depthdecay.errors import DepthDecayError
from depthdecay.plan.file import EMBEDDED_PLAN


def configured(model: str, **settings: Any) -> Any:
    """The configuration of an engine that is not started."""
    from vllm.engine.arg_utils import EngineArgs

    depth = settings.pop("depth_decay", {})
    overrides = {"architectures": ["DepthDecayLlamaForCausalLM"], "depth_decay": depth}
    given = {"enforce_eager": True, "hf_overrides": overrides, "dtype": "float32", "skip_tokenizer_init": True}
    return EngineArgs(model, **{**given, **settings}).create_engine_config()


def test_a_server_is_given_our_worker_and_where_prefixes_are_cached_our_scheduler(tiny: str) -> None:
    config = configured(tiny)
    assert config.parallel_config.worker_cls == "depthdecay.integrations.vllm.worker.DepthDecayWorker"
    assert config.scheduler_config.scheduler_cls == "depthdecay.integrations.vllm.scheduler.make_scheduler"
    assert configured(tiny, enable_prefix_caching=False).scheduler_config.scheduler_cls is None
    waiting = configured(tiny, enable_prefix_caching=False, depth_decay={"group_wait_ms": 50}).scheduler_config
    assert waiting.scheduler_cls == "depthdecay.integrations.vllm.scheduler.make_scheduler"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enforce_eager": False}, "freeze at the first step's depth; add --enforce-eager"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "leave --speculative-config out"),
        ({"enable_lora": True}, "leave --enable-lora out"),
        ({"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}, "--worker-cls is vllm.v1.worker.cpu_worker.CPUWorker"),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "must not hold decayed text"),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "a cache must not leave this engine",
        ),
        ({"depth_decay": {"plan": str(EMBEDDED_PLAN)}}, "the plan is for 30 layers, but the model has 8"),
        ({"depth_decay": {"alpha": 2}}, "alpha is 2"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(
    tiny: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        configured(tiny, **settings)


def test_a_plan_with_maps_for_other_weights_is_refused_when_weights_are_loaded(smollm2: str, tmp_path: Path) -> None:
    """The same shape with other weights, as from another training run."""
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(smollm2, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: -tensor for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="other weights"):
        our_engine(str(other), {"plan": str(EMBEDDED_PLAN)})


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ("model_config", {"enable_sleep_mode": True}, "leave --enable-sleep-mode out"),
        ("model_config", {"runner_type": "pooling"}, "leave --runner and --convert out"),
        ("parallel_config", {"enable_dbo": True}, "leave --enable-dbo and --ubatch-size out"),
        ("parallel_config", {"decode_context_parallel_size": 2}, "context parallelism; leave its sizes at 1"),
        ("parallel_config", {"prefill_context_parallel_size": 2}, "context parallelism; leave its sizes at 1"),
        ("cache_config", {"kv_sharing_fast_prefill": True}, "leave --kv-sharing-fast-prefill out"),
    ],
)
def test_what_this_machine_cannot_be_asked_for_is_refused_where_it_can(
    tiny: str, monkeypatch: pytest.MonkeyPatch, part: str, values: dict[str, Any], message: str
) -> None:
    """In a complete configuration: on a CPU or for a tiny model, vLLM itself would refuse these."""
    from depthdecay.integrations.vllm.refusals import DepthDecayModelConfig

    config = configured(tiny)
    for name, value in values.items():
        monkeypatch.setattr(getattr(config, part), name, value)
    with pytest.raises(DepthDecayError, match=re.escape(message)):
        DepthDecayModelConfig.verify_and_update_config(config)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": 2}, "use mode 0 or 3, not DYNAMO_TRACE_ONCE"),
        ({"cudagraph_mode": "PIECEWISE"}, "which cudagraph_mode PIECEWISE does not have"),
        ({"cudagraph_mode": "FULL_DECODE_ONLY"}, None),
        ({}, None),
    ],
)
def test_the_second_runner_takes_full_graphs_of_decode_batches(
    tiny: str, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], message: str | None
) -> None:
    from vllm.config import CompilationConfig, VllmConfig

    from depthdecay.integrations.vllm import refusals

    config = configured(tiny)
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    monkeypatch.setattr(config, "compilation_config", CompilationConfig(**values))
    monkeypatch.setattr(refusals, "GRAPHS_IN_SECOND_RUNNER", True)
    reasons = list(refusals._reasons_against_graphs(config))
    assert [message in reason for reason in reasons] == [True] if message else not reasons
    monkeypatch.setattr(refusals, "GRAPHS_IN_SECOND_RUNNER", False)
    assert "set VLLM_USE_V2_MODEL_RUNNER=0" in next(refusals._reasons_against_graphs(config))


def test_other_devices_and_the_front_end_in_rust_are_refused(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import platforms

    from depthdecay.integrations.vllm.refusals import DepthDecayModelConfig

    config = configured(tiny)
    with monkeypatch.context() as changed:
        # Not the environment: vLLM may have cached it when an engine started.
        changed.setattr("vllm.envs.VLLM_USE_RUST_FRONTEND", True)
        with pytest.raises(DepthDecayError, match="leave VLLM_USE_RUST_FRONTEND out"):
            DepthDecayModelConfig.verify_and_update_config(config)
    for kind in ("is_cpu", "is_cuda_alike"):
        monkeypatch.setattr(type(platforms.current_platform), kind, lambda self: False)
    with pytest.raises(DepthDecayError, match="not this device"):
        DepthDecayModelConfig.verify_and_update_config(config)


def test_eager_mode_turns_compilation_off(tiny: str) -> None:
    """Compiled code would run every step at the first one's depth."""
    config = configured(tiny, compilation_config={"mode": 3, "cudagraph_mode": "FULL"}).compilation_config
    assert (config.mode.name, config.cudagraph_mode.name) == ("NONE", "NONE")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hf_overrides": {"depth_decay": {"alpha": 0.9}}}, 'add "architectures": ["DepthDecayLlamaForCausalLM"]'),
        (
            {"hf_overrides": {"depth_decay": {"alpha": 0.9}}, "model_impl": "transformers"},
            "TransformersForCausalLM would ignore it; known are LlamaForCausalLM",
        ),
        # vLLM itself refuses this one.
        (
            {"hf_overrides": {"architectures": ["DepthDecayLlamaForCausalLM"]}, "model_impl": "transformers"},
            "'DepthDecayLlamaForCausalLM' is not a registered model in the Transformers library",
        ),
    ],
)
def test_a_model_that_would_ignore_the_plan_does_not_start(tiny: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        stock_engine(tiny, skip_tokenizer_init=True, max_model_len=200, **settings)


def test_a_model_of_another_kind_is_refused_with_the_kinds_there_are() -> None:
    from depthdecay.integrations.vllm.admission import check_model

    other = SimpleNamespace(architecture="GPT2LMHeadModel", hf_config=SimpleNamespace(depth_decay={"alpha": 0.9}))
    with pytest.raises(DepthDecayError, match="GPT2LMHeadModel would ignore it; known are LlamaForCausalLM, "):
        check_model(other)
    check_model(SimpleNamespace(architecture="GPT2LMHeadModel", hf_config=SimpleNamespace()))


def test_attention_that_is_not_known_is_refused_before_weights_are_loaded(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("depthdecay.integrations.vllm.models.BACKENDS", ("FLASH_ATTN",))
    with pytest.raises(DepthDecayError, match="backend CPU_ATTN; add --attention-backend with one of FLASH_ATTN"):
        our_engine(tiny, {}, skip_tokenizer_init=True, max_model_len=200)


def test_blocks_that_attention_splits_are_refused_when_the_cache_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from depthdecay.integrations.vllm import releases
    from depthdecay.integrations.vllm.worker import DepthDecayWorker, PlatformWorker

    monkeypatch.setattr(PlatformWorker, "initialize_from_config", lambda self, config: None)
    worker = DepthDecayWorker.__new__(DepthDecayWorker)
    worker.use_v2_model_runner = False
    whole, split = SimpleNamespace(kernel_block_size=None), SimpleNamespace(kernel_block_size=16)
    worker.model_runner = SimpleNamespace(attn_groups=[[whole]])
    worker.initialize_from_config(None)
    worker.model_runner = SimpleNamespace(attn_groups=[[whole], [whole, split]])
    if releases.IS_0_26:  # its block tables are split per request, before attention sees them
        worker.initialize_from_config(None)
        return
    with pytest.raises(DepthDecayError, match="add --block-size 16"):
        worker.initialize_from_config(None)


def test_a_worker_that_passes_no_depths_fails_at_its_first_step(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that replaced ours after the configuration was checked."""
    model = ours.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
    monkeypatch.setattr("depthdecay.integrations.vllm.models.is_forward_context_available", lambda: True)
    monkeypatch.setattr(
        "depthdecay.integrations.vllm.models.get_forward_context",
        lambda: SimpleNamespace(attn_metadata={"some": "rows"}),
    )
    with pytest.raises(DepthDecayError, match="leave --worker-cls out"):
        model(None, None)


def test_weights_that_were_loaded_unseen_get_a_warning(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ours.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
    told: list[str] = []
    monkeypatch.setattr(
        "depthdecay.integrations.vllm.models.logger.warning", lambda form, *words: told.append(form % words)
    )
    model.tell_of_unseen_weights()
    assert not told
    monkeypatch.setattr(model, "_weights_seen", False)
    model.tell_of_unseen_weights()
    assert len(told) == 1
    assert "is unknown" in told[0]


def test_beams_and_streaming_input_are_refused_and_the_engine_goes_on(ours: Any) -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import BeamSearchParams

    with pytest.raises(VLLMValidationError, match="leave use_beam_search out"):
        ours.beam_search([{"prompt_token_ids": [5, 6, 7]}], BeamSearchParams(beam_width=2, max_tokens=4))
    processor = ours.llm_engine.input_processor
    with pytest.raises(VLLMValidationError, match="streaming input cannot be served with depth decay"):
        processor.process_inputs("r", {"prompt_token_ids": [5, 6, 7]}, asked(4), ("generate",), resumable=True)
    assert len(ours.generate([{"prompt_token_ids": [5, 6, 7]}], asked(4), use_tqdm=False)) == 1
