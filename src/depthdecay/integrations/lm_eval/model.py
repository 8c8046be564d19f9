"""lm-eval's model "depthdecay": its Hugging Face class, generating with our engine."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from depthdecay.engine.engine import Engine
from depthdecay.engine.plan_choice import DepthSettings, require_mode
from depthdecay.errors import DepthDecayError
from depthdecay.model.load import load
from depthdecay.plan.file import EMBEDDED_MODEL
from depthdecay.plan.plan import Plan

# The arguments of lm-eval's class that apply to a loaded model. The others are about loading, which we do ourselves.
_PASSED_ON = (
    *("batch_size", "max_batch_size", "max_length", "truncation", "add_bos_token", "prefix_token_id"),
    *("logits_cache", "softmax_dtype", "think_end_token", "enable_thinking", "chat_template_args"),
)


@register_model("depthdecay")
class DepthDecayLM(HFLM):
    """Prompts, templates, truncation, stop sequences and scores are lm-eval's; only decoding is ours."""

    def __init__(
        self,
        pretrained: str = EMBEDDED_MODEL,
        *,
        plan: str | None = None,
        alpha: str | None = None,
        speedup: str | None = None,
        over: int | None = None,
        mode: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        compile: bool | None = None,
        trust_remote_code: bool = False,
        allow_other_weights: bool = False,
        **settings: Any,
    ) -> None:
        unknown = sorted(set(settings) - set(_PASSED_ON))
        if unknown:
            known = ", ".join(sorted(_PASSED_ON))
            raise DepthDecayError(
                f"the model argument '{unknown[0]}' is not supported; supported arguments of lm-eval are {known}"
            )
        depth = DepthSettings(plan, alpha, speedup, over).read()
        require_mode(mode)
        loaded = load(pretrained, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
        self.engine = Engine(loaded, plan=depth, mode=mode, compile=compile, allow_other_weights=allow_other_weights)
        if loaded.tokenizer is None:
            raise DepthDecayError(f"'{pretrained}' has no tokenizer, which lm-eval needs; use a model that has one")
        with _quiet("lm_eval.models.huggingface"):  # it warns that settings may be ignored; those are refused above
            super().__init__(loaded.model, backend="causal", tokenizer=loaded.tokenizer, **settings)
        if loaded.source == "hub":
            self.pretrained = loaded.name  # lm-eval looks up its commit
        self.mode = mode or self.engine.step_mode
        self.generated_tokens = self.layers_executed = 0
        self._warned = False

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        texts: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
        if self.mode == "decay":
            tokens = self.generated_tokens
            print(f"layer speed-up {self.layer_speedup:.3f}x over {tokens} generated tokens", file=sys.stderr)
        return texts

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **settings: Any) -> torch.Tensor:
        """In lm-eval's format: prompts padded on the left, each answer after its prompt."""
        mask = settings.pop("attention_mask").bool()
        if settings.get("num_beams") == 1:  # some tasks state explicitly that they use no beams
            del settings["num_beams"]
        ends = settings.pop("eos_token_id", self.model.generation_config.eos_token_id)
        results = self.engine.generate(
            [row[kept].tolist() for row, kept in zip(context, mask, strict=True)],
            max_length - context.shape[1],
            mode=self.mode,
            stop=[text for text in stop if text],
            eos_token_id=self._end_tokens(ends, stop),
            **settings,
        )
        self.generated_tokens += sum(len(result.token_ids) for result in results)
        self.layers_executed += sum(result.layers_executed for result in results)
        longest = max(len(result.token_ids) for result in results)
        padding = [self.tokenizer.pad_token_id] * longest
        answers = [result.token_ids + padding[len(result.token_ids) :] for result in results]
        return torch.cat([context, torch.tensor(answers, device=context.device)], dim=1)

    def _end_tokens(self, ends: int | Sequence[int] | None, stop: list[str]) -> list[int]:
        """The model's end tokens, and stop sequences that are special tokens, which decoded text does not contain."""
        own = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        special = special_token_ids(self.tokenizer)
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        return sorted({end for end in (*own, *(special.get(text, -1) for text in stop)) if 0 <= end < vocabulary})

    def _loglikelihood_tokens(self, *args: Any, **kwargs: Any) -> Any:
        # Not refused: scored text is prefilled like a prompt, so even with decay these are the full model's scores.
        if self.mode == "decay" and not self._warned:
            self._warned = True
            warnings.warn(
                "log-likelihood tasks generate nothing, so depth decay has no effect: their scores are at full depth",
                stacklevel=1,
            )
        return super()._loglikelihood_tokens(*args, **kwargs)

    def _plan(self) -> Plan:
        """The plan in use: in lossless mode the one for drafting, which the engine creates if none was given."""
        if self.mode == "lossless":
            return self.engine.drafting_plan
        return self.engine.plan if self.mode == "decay" and self.engine.plan is not None else self.engine.full_plan

    @property
    def layer_speedup(self) -> float:
        full = self.engine.stack.num_layers * self.generated_tokens
        return full / self.layers_executed if full else 1.0

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes next to the scores; called after the run, so it includes the layer counts."""
        return super().get_model_info() | {
            "depth_plan": self._plan().describe(),
            "generated_tokens": self.generated_tokens,
            "layers_executed": self.layers_executed,
            "layer_speedup": self.layer_speedup,
        }


def special_token_ids(tokenizer: Any) -> dict[str, int]:
    """Tokens that are left out of decoded text."""
    return {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
