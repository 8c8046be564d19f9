"""Pass tokens to a transformers streamer while an answer is in progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from depthdecay.errors import ArgumentError

if TYPE_CHECKING:
    from depthdecay.engine.result import Result


@contextmanager
def told_to(streamer: Any, prompts: Sequence[Sequence[int]], results: Sequence[Result]) -> Iterator[Callable[[], None]]:
    """Yields a function that passes on new tokens, one by one as generate does, after the prompt.

    The streamer is ended even if decoding fails, so that a reader in another thread does not wait forever.
    """
    if streamer is None:
        yield lambda: None
        return
    if not (callable(getattr(streamer, "put", None)) and callable(getattr(streamer, "end", None))):
        raise ArgumentError(f"streamer is {streamer!r}; expected a transformers streamer", "streamer")
    if len(prompts) > 1:
        raise ArgumentError(f"streamer was given with {len(prompts)} prompts; it can follow one", "streamer")
    told = 0

    def tell() -> None:
        nonlocal told
        for token in results[0].token_ids[told:]:
            streamer.put(torch.tensor([token]))
            told += 1

    try:
        streamer.put(torch.tensor([prompts[0]]))
        yield tell
        tell()
    finally:
        streamer.end()
