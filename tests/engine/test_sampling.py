"""Keyed noise: a function of seed, sequence, token index and nothing else, and distributed as Gumbel noise."""

from __future__ import annotations

import math

import torch

from depthdecay.engine.sampling import gumbel_noise, sequence_keys, step_keys

PROMPTS = [[1, 2, 3], [4], [1, 2, 3]]


def test_keys_depend_on_seed_prompt_and_repetition() -> None:
    keys = sequence_keys(7, PROMPTS)
    assert len(set(keys)) == 3
    assert keys[:1] == sequence_keys(7, [[1, 2, 3]])
    assert keys[1:2] == sequence_keys(7, [[4]])
    assert not set(keys) & set(sequence_keys(8, PROMPTS))


def test_noise_of_a_row_ignores_its_neighbours() -> None:
    keys = step_keys(sequence_keys(7, PROMPTS), 5, torch.device("cpu"))
    together = gumbel_noise(keys[:, 3], 50)
    alone = gumbel_noise(keys[1:2, 3], 50)
    assert torch.equal(together[1:2], alone)
    assert not torch.equal(together[0], together[2])
    assert not torch.equal(gumbel_noise(keys[:, 2], 50), together)


def test_argmax_of_noisy_logits_is_a_draw_from_the_softmax() -> None:
    draws = 20000
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    keys = step_keys(sequence_keys(0, [[1]]), draws, torch.device("cpu"))[0]
    noisy = probabilities.log() + gumbel_noise(keys, 5)
    counts = torch.bincount(noisy.argmax(dim=-1), minlength=5).float()
    chi_square = ((counts - draws * probabilities) ** 2 / (draws * probabilities)).sum()
    assert chi_square < 18.5  # 4 degrees of freedom: exceeded once in a thousand seeds; this seed is fixed


def test_noise_has_the_moments_of_gumbel() -> None:
    keys = step_keys(sequence_keys(3, [[1], [2]]), 50, torch.device("cpu")).flatten()
    noise = gumbel_noise(keys, 2000)
    assert torch.isfinite(noise).all()
    assert abs(float(noise.mean()) - 0.5772) < 0.02
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.05
    neighbours = torch.corrcoef(torch.stack([noise[:, :-1].flatten(), noise[:, 1:].flatten()]))[0, 1]
    assert abs(float(neighbours)) < 0.02
