"""How the next token is picked: transformers' own processors, and noise keyed by (seed, sequence, token index)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel

_MASK32 = 0xFFFFFFFF


def sequence_keys(seed: int, prompts: Sequence[Sequence[int]]) -> list[int]:
    """One key a sequence, from the seed, the prompt, and how often the same prompt came before it in the batch.

    So a seeded prompt draws the same numbers alone and in any batch, and a prompt given twice still draws two samples.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    keys = []
    for prompt in prompts:
        ids = tuple(prompt)
        material = f"{seed}/{seen[ids]}/{','.join(map(str, ids))}".encode()
        keys.append(int.from_bytes(hashlib.blake2b(material, digest_size=8).digest(), "little"))
        seen[ids] += 1
    return keys


def step_keys(keys: Sequence[int], tokens: int, device: torch.device) -> torch.Tensor:
    """Keys of every step as a (sequence, token) tensor, moved once so that no step waits for a copy."""
    low = torch.tensor([[k & _MASK32] for k in keys], dtype=torch.int64)
    high = torch.tensor([[(k >> 32) & _MASK32] for k in keys], dtype=torch.int64)
    index = torch.arange(tokens, dtype=torch.int64).unsqueeze(0)
    return _mix(_mix(index * 0x9E3779B1 + low) + high).to(device)


def gumbel_noise(keys: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Standard Gumbel noise, a row per key: argmax(logits + noise) is a draw from softmax(logits).

    A counter-based hash instead of a generator: it needs no state, gives the same numbers on every device, and the
    noise of one row does not depend on the other rows.
    """
    lanes = torch.arange(vocabulary, dtype=torch.int64, device=keys.device) * 0x85EBCA77
    bits = _mix(_mix(lanes.unsqueeze(0) + keys.unsqueeze(1)) + keys.unsqueeze(1)) >> 8
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform))


def likeliest(scores: torch.Tensor) -> torch.Tensor:
    """The greedy choice of each row. On a CPU by numpy: torch wakes its threads for it, which then stand in the way."""
    if scores.device.type == "cpu" and not scores.requires_grad:
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Murmur3's 32-bit finaliser, in 64-bit integers so that shifts are logical on every device."""
    x = x & _MASK32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK32
    return x ^ (x >> 16)


class Sampler:
    """Turns a step's logits into tokens on the device, without waiting for it."""

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: Any,
        prompt_ids: torch.Tensor,
        *,
        logits_processor: Sequence[Any] | None,
        keys: Sequence[int],
        max_new_tokens: int,
    ) -> None:
        device = prompt_ids.device
        model._prepare_special_tokens(generation_config, True, device=device)
        self.processors: LogitsProcessorList = model._get_logits_processor(
            generation_config=generation_config,
            input_ids_seq_length=prompt_ids.shape[1],
            encoder_input_ids=prompt_ids,
            logits_processor=LogitsProcessorList(logits_processor or []),
            device=str(device),
            model_kwargs={},
        )
        self.is_sampling = bool(generation_config.do_sample)
        self.keys = step_keys(keys, max_new_tokens, device) if self.is_sampling else None
        batch, prompt_length = prompt_ids.shape
        self.prompt_length = prompt_length
        self.history = torch.zeros((batch, prompt_length + max_new_tokens), dtype=torch.long, device=device)
        self.history[:, :prompt_length] = prompt_ids

    @property
    def is_plain_greedy(self) -> bool:
        """Argmax and nothing else, which a captured graph does by itself."""
        return not self.is_sampling and not self.processors

    def pick(self, logits: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens T_index of all rows, and the processed scores that they were picked from."""
        scores = logits.to(torch.float32)
        if self.processors:
            scores = self.processors(self.text(index), scores)
        if self.keys is None:
            return likeliest(scores), scores
        return (scores + gumbel_noise(self.keys[:, index], scores.shape[-1])).argmax(dim=-1), scores

    def record(self, tokens: torch.Tensor, index: int) -> None:
        self.history[:, self.prompt_length + index] = tokens

    def text(self, index: int) -> torch.Tensor:
        """Prompt and the tokens before T_index, as processors and stopping criteria expect them."""
        return self.history[:, : self.prompt_length + index]
