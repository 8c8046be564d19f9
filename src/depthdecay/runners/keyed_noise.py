"""Noise keyed by (seed, sequence, token index): stateless, and the same numbers on every device and in every batch.

A draft, its verification and plain decoding draw the same noise for a token.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch

_MASK32 = 0xFFFFFFFF
# In float32 the last of 24 bits' values plus a half rounds to 1. Its noise would be infinite and draw that token,
# whatever the logits are: once in 340 tokens with a vocabulary of 49,152.
HIGHEST_UNIFORM = 1 - 2.0**-24


def sequence_keys(seed: int, prompts: Sequence[Sequence[int]]) -> list[int]:
    """One key per sequence, from the seed, the prompt, and how often the same prompt came before it in the batch.

    So a seeded prompt draws the same noise alone and in any batch, and a prompt given twice still gets two samples.
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
    """Keys of every step as a (sequence, token) tensor, copied once so that no step waits for a copy."""
    low = torch.tensor([[k & _MASK32] for k in keys], dtype=torch.int64)
    high = torch.tensor([[(k >> 32) & _MASK32] for k in keys], dtype=torch.int64)
    index = torch.arange(tokens, dtype=torch.int64).unsqueeze(0)
    return _mix(_mix(index * 0x9E3779B1 + low) + high).to(device)


def gumbel_noise(keys: torch.Tensor, vocabulary: int, tokens: torch.Tensor | None = None) -> torch.Tensor:
    """Standard Gumbel noise, a row per key: argmax(logits + noise) is a draw from softmax(logits).

    `tokens`: the tokens that the noise is for, of all rows or of each, if not the whole vocabulary.

    A counter-based hash instead of a generator: it is stateless, gives the same numbers on every device, and the noise
    of one row does not depend on the other rows.
    """
    lanes = torch.arange(vocabulary, dtype=torch.int64, device=keys.device) if tokens is None else tokens
    bits = _mix(_mix(lanes * 0x85EBCA77 + keys.unsqueeze(1)) + keys.unsqueeze(1)) >> 8
    uniform = ((bits.to(torch.float32) + 0.5) * 2.0**-24).clamp(max=HIGHEST_UNIFORM)
    return -torch.log(-torch.log(uniform))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Murmur3's 32-bit finaliser, in 64-bit integers so that shifts are logical on every device."""
    x = x & _MASK32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK32
    return x ^ (x >> 16)
