"""Check depth decay on a given model: output equals transformers' generate, and the model is left unchanged."""

from __future__ import annotations

import gc
import itertools
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from depthdecay.argument_checks import whole_number
from depthdecay.engine.engine import Engine
from depthdecay.engine.plan_choice import DepthSettings, guess_is_meant
from depthdecay.errors import DepthDecayError
from depthdecay.integrations.transformers.applied import applied
from depthdecay.library_internals import forward_hooks
from depthdecay.model.layers import LayerStack
from depthdecay.model.load import as_loaded
from depthdecay.model.loaded_model import LoadedModel
from depthdecay.plan.plan import Plan

NEW_TOKENS = 24
BITS_TOKENS = 96  # for comparing windows with single steps: enough for several windows of each length
_TEXTS = (
    "Why is the sky blue?",
    "Write one sentence about the sea, and one about the mountains behind it.",
    "Count from one to ten.",
)


@dataclass(frozen=True)
class CheckRow:
    """One thing that was checked."""

    name: str
    passed: bool
    detail: str


def check(
    model: str | LoadedModel,
    plan: Plan | str | os.PathLike[str] | None = None,
    *,
    new_tokens: int = NEW_TOKENS,
    allow_other_weights: bool = False,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[CheckRow], None] | None = None,
) -> list[CheckRow]:
    """Compare full depth, lossless mode and decay with transformers' own generate; one row per check.

    For a GGUF file, the tokenizer is first compared with the file's own fields.

        assert all(row.passed for row in dd.check("smollm2-135m"))

    Without a plan, it uses one that drops a layer early and several by the end. A model given by name is loaded in
    float32 by default: in 16 bits, tokens may differ by rounding alone. Only on CUDA, where lossless answers are exact
    in 16 bits too, is it then loaded in its own dtype for that. `progress` gets each row as it is known.
    """
    whole_number("new_tokens", new_tokens, 1)
    stored = DepthSettings.of(plan).stored()
    place = {"device": device, "trust_remote_code": trust_remote_code or None}
    by_default = isinstance(model, str) and dtype is None
    loaded = as_loaded(model, **place, dtype="fp32" if by_default else dtype)
    rows = []
    decoding = check_model(
        loaded.model, loaded.tokenizer, stored, new_tokens=new_tokens, allow_other_weights=allow_other_weights
    )
    every = [check_gguf_tokenizer(loaded), decoding]
    if by_default and loaded.model.device.type == "cuda":
        del loaded  # a generator keeps it until it has ended
        every.append(check_own_dtype(lambda: as_loaded(model, **place), stored, allow_other_weights))
    with guess_is_meant():  # this checks equality, not quality
        for row in itertools.chain.from_iterable(every):
            rows.append(row)
            if progress is not None:
                progress(row)
    return rows


class _Deliberate(Exception):
    """Raised on purpose, to check that the model is restored after an error."""


def default_plan(num_layers: int, new_tokens: int = NEW_TOKENS) -> Plan | None:
    """A decay that drops a layer early and several by the end; None where the model has no layer to spare."""
    if num_layers < 2:
        return None
    core = min(2, (num_layers - 1) // 2)
    ladder_floor = max(1, 2 * core)
    reachable = max(ladder_floor, num_layers * 2 // 3)
    alpha = (reachable / num_layers) ** (1 / max(1, new_tokens - 1))
    return Plan.decay(num_layers, f"{alpha:.6f}", core_head=core, core_tail=core, min_layers=reachable)


def check_prompts(model: Any, tokenizer: Any = None) -> list[list[int]]:
    """Three prompts of unequal length: texts, or random token ids for a model without a tokenizer."""
    if tokenizer is not None:
        from depthdecay.model.prompts import prompt_ids

        return [prompt_ids(tokenizer, text) for text in _TEXTS]
    vocabulary = model.get_input_embeddings().weight.shape[0]
    draw = random.Random(0)
    return [[draw.randrange(vocabulary) for _ in range(length)] for length in (9, 17, 5)]


def check_gguf_tokenizer(loaded: LoadedModel) -> Iterator[CheckRow]:
    """Compare the tokenizer of a model from a GGUF file with the file itself; yields nothing for other models.

    The engine and transformers' generate get the same tokens, so no other check here would notice wrong ones.
    """
    if loaded.origin is None or loaded.origin.gguf is None:
        return
    from depthdecay.model import gguf_reference

    fields = gguf_reference.read_fields(loaded.origin.gguf)
    tokenizer = loaded.tokenizer
    yield _as_filed(
        "vocabulary equals the file's",
        gguf_reference.vocabulary_differences(tokenizer, fields),
        f"{len(fields.tokens):,} tokens",
    )
    around = " and ".join(name for name, adds in (("BOS", fields.adds_bos), ("EOS", fields.adds_eos)) if adds)
    yield _as_filed(
        "special tokens are the file's",
        gguf_reference.special_token_differences(tokenizer, loaded.model.generation_config, fields),
        f"text gets {around or 'neither BOS nor EOS'}; {len(fields.ends)} tokens end an answer",
    )
    yield _as_filed(
        "chat template is the file's",
        gguf_reference.template_differences(tokenizer, fields),
        f"{len(fields.chat_template):,} characters" if fields.chat_template else "the file has no template",
    )
    differences, total = gguf_reference.text_differences(tokenizer, fields)
    unnamed = "; the file names no pre-tokenizer, so GPT-2's is used" if fields.names_no_split else ""
    yield _as_filed("text is tokenized as the file says", differences, f"{total} tokens{unnamed}")


def _as_filed(name: str, differences: list[str], right: str) -> CheckRow:
    more = f"; and {len(differences) - 2} more" if len(differences) > 2 else ""
    return CheckRow(name, not differences, "; ".join(differences[:2]) + more or right)


def check_model(
    model: Any,
    tokenizer: Any = None,
    plan: Plan | None = None,
    *,
    new_tokens: int = NEW_TOKENS,
    allow_other_weights: bool = False,
) -> Iterator[CheckRow]:
    """Yield one row per check, as soon as it is known. Greedy, on the model's device and in its dtype."""
    stack = LayerStack.of(model)
    plan = plan or default_plan(stack.num_layers, new_tokens)
    prompts = check_prompts(stack.model, tokenizer)
    engine = Engine(model, tokenizer, plan, compile=False, allow_other_weights=allow_other_weights)
    expected = [reference(model, prompt, new_tokens) for prompt in prompts]
    # Taken after the plain generate, which may set attributes of its own, and before any of our code runs.
    before = model_state(stack.model)
    hint = _rounding_hint(stack.model)

    single = [engine.generate([prompt], new_tokens, mode="full", do_sample=False)[0] for prompt in prompts]
    yield _compare("full depth equals generate", [r.token_ids for r in single], expected, hint)
    batch = engine.generate(prompts, new_tokens, mode="full", do_sample=False)
    yield _compare("batch equals single", [r.token_ids for r in batch], [r.token_ids for r in single], hint)

    lossless = [engine.generate([prompt], new_tokens, mode="lossless", do_sample=False)[0] for prompt in prompts]
    yield _compare("lossless equals full depth", [r.token_ids for r in lossless], [r.token_ids for r in single], hint)
    if engine.uses_graphs:
        yield from _check_compiled(Engine(model, tokenizer, plan, allow_other_weights=allow_other_weights), prompts)

    if plan is None:
        yield CheckRow("decay", True, "skipped: a model with one layer has none to drop")
    else:
        decayed = [engine.generate([prompt], new_tokens, do_sample=False)[0] for prompt in prompts]
        batch = engine.generate(prompts, new_tokens, do_sample=False)
        yield _compare(
            "decayed batch equals single", [r.token_ids for r in batch], [r.token_ids for r in decayed], hint
        )
        texts, depths = [], []
        for prompt in prompts:
            with applied(model, plan, allow_other_weights=allow_other_weights) as account:
                texts.append(reference(model, prompt, new_tokens))
            depths.append(list(account.depths))
        yield _compare("decayed generate equals the engine", texts, [r.token_ids for r in decayed], hint)
        planned = [list(plan.depths(len(r.token_ids))) for r in decayed]
        right = depths == planned and [r.depths for r in decayed] == planned
        lowest = min(min(row) for row in planned)
        yield CheckRow(
            "layers counted equal the plan",
            right,
            f"{stack.num_layers} down to {lowest} layers" if right else f"planned {planned}, counted {depths}",
        )
    _fail_on_purpose(model, engine, plan, prompts[0], allow_other_weights)
    differences = state_differences(before, model_state(stack.model))
    modules = sum(1 for _ in stack.model.modules())
    yield CheckRow(
        "model restored, also after an error",
        not differences,
        "; ".join(differences[:3]) or f"{modules} modules, weights and configuration as before",
    )


def check_own_dtype(
    load: Callable[[], LoadedModel], plan: Plan | None, allow_other_weights: bool = False
) -> Iterator[CheckRow]:
    """Check compiled layers in the dtype that answers have by default, where that is not float32."""
    gc.collect()  # the model that was checked before
    loaded = load()
    model = loaded.model
    if model.dtype != torch.float32:
        plan = plan or default_plan(LayerStack.of(model).num_layers, BITS_TOKENS)
        engine = Engine(model, loaded.tokenizer, plan, allow_other_weights=allow_other_weights)
        yield from _check_compiled(engine, check_prompts(model, loaded.tokenizer))


def _check_compiled(engine: Engine, prompts: list[list[int]]) -> Iterator[CheckRow]:
    """Compiled layers, which answers use by default: where they are reported exact, lossless must equal full depth."""
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
    full, lossless = (
        [engine.generate([prompt], BITS_TOKENS, mode=mode, **settings)[0] for prompt in prompts]
        for mode in ("full", "lossless")
    )
    dtype = str(engine.stack.model.dtype).removeprefix("torch.")
    name = f"compiled lossless equals compiled full depth, {dtype}"
    row = _compare(name, [r.token_ids for r in lossless], [r.token_ids for r in full], "")
    if lossless[0].exact:
        yield CheckRow(name, row.passed, f"{row.detail}, exact: yes")
        yield _check_widths(engine, prompts[0], full[0].token_ids)
    else:
        yield CheckRow(name, True, f"exact: no, near-ties may flip ({lossless[0].inexact_because}); {row.detail}")


def _check_widths(engine: Engine, prompt: list[int], text: list[int]) -> CheckRow:
    """Drafters differ, and may be trained later. So the passes themselves are compared too."""
    from depthdecay.cuda.width_trial import WIDTHS, WidthTrial, splits

    trial = WidthTrial(engine.stack, engine.compiled, len(prompt) + len(text))
    difference = trial.first_difference(prompt, text)
    same = f"{len(text)} tokens in {len(list(splits(len(text))))} splits into passes of {WIDTHS[0]} to {WIDTHS[-1]}"
    dtype = str(engine.stack.model.dtype).removeprefix("torch.")
    return CheckRow(f"the same bits in passes of any width, {dtype}", difference is None, difference or same)


def reference(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """The answer of transformers' own greedy generate."""
    ids = torch.tensor([prompt], device=model.device)
    with torch.no_grad():
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False
        )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


def _compare(name: str, got: list[list[int]], wanted: list[list[int]], hint: str) -> CheckRow:
    for number, (a, b) in enumerate(zip(got, wanted, strict=True), start=1):
        if a != b:
            pairs = zip(a, b, strict=False)
            at = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
            return CheckRow(name, False, f"prompt {number} diverges at token {at}{hint}")
    return CheckRow(name, True, f"{len(got)} prompts, {sum(map(len, got))} tokens")


def _rounding_hint(model: Any) -> str:
    if model.dtype == torch.float32:
        return ""
    return f"; in {str(model.dtype).removeprefix('torch.')} this may be a near-tie, so check in float32"


def _fail_on_purpose(
    model: Any, engine: Engine, plan: Plan | None, prompt: list[int], allow_other_weights: bool
) -> None:
    def interrupt(*_: Any, **__: Any) -> Any:
        raise _Deliberate

    attempts: list[Callable[[], Any]] = [
        lambda: engine.generate([prompt], 4, do_sample=False, stopping_criteria=[interrupt])
    ]
    if plan is not None:

        def inside_applied() -> None:
            with applied(model, plan, allow_other_weights=allow_other_weights):
                raise _Deliberate

        attempts.append(inside_applied)
    for attempt in attempts:
        try:
            attempt()
        except _Deliberate:
            continue
        raise DepthDecayError("an error raised during decoding did not reach the caller")


def model_state(model: Any) -> dict[str, Any]:
    """Everything a wrapper could have left changed: attributes, methods, weights, configuration."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        own = module.__dict__
        state[f"attributes of {name or 'the model'}"] = frozenset(own)
        # Methods that shadow the class's own. Transformers, accelerate and PEFT set some, which must stay.
        state[f"methods of {name or 'the model'}"] = {key: id(value) for key, value in own.items() if callable(value)}
        state[f"hooks of {name or 'the model'}"] = forward_hooks(module)
        state[f"training flag of {name or 'the model'}"] = module.training
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        state[f"tensor {name}"] = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), _checksum(tensor))
    state["configuration"] = model.config.to_dict()
    generation_config = getattr(model, "generation_config", None)
    state["generation_config"] = None if generation_config is None else generation_config.to_dict()
    return state


def state_differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    names = [*before, *(name for name in after if name not in before)]
    return [f"{name} changed" for name in names if before.get(name) != after.get(name)]


def _checksum(tensor: torch.Tensor) -> int:
    if tensor.device.type == "meta":
        return 0  # offloaded
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    # Sum the bits as integers: a sum of floats depends on its order and misses NaN.
    flat = tensor.detach().contiguous().flatten()
    return int(flat.view(sizes[tensor.element_size()]).sum(dtype=torch.int64)) if flat.numel() else 0
