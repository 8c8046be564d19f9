"""Texts as independent rows of a batch, as in a server: each at its own position, with its own windows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from depthdecay.engine.request import Request
from depthdecay.engine.result import Piece, Result

if TYPE_CHECKING:
    from depthdecay.batching.batcher import Batcher
    from depthdecay.engine.engine import Engine

PREFILL_TOKENS = 2048  # per prefill pass over several texts


def decode_rows(engine: Engine, request: Request, results: list[Result], exact: bool = False) -> Iterator[list[Piece]]:
    """Decode texts as independent rows, as in a server's batch; in lossless mode each has its own windows."""
    from depthdecay.batching.batcher import Batcher, BatchSettings

    started, count = time.perf_counter(), len(results)
    request = replace(request, own_limits=[request.max_new_tokens] * count)
    positions = max(map(len, request.prompts)) + request.max_new_tokens
    settings = BatchSettings(
        max_batch=count,
        prefill_tokens=PREFILL_TOKENS,
        cohort_seconds=0,
        max_positions=positions,
        draft_rows=16 if engine.uses_graphs else 64,
        prompts_first=True,
        exact=exact,
    )

    def fits(kept: Batcher) -> bool:
        alike = kept.settings.exact == exact and kept.max_positions >= positions
        return alike and (kept.settings.max_batch == count or (exact and kept.settings.max_batch > count))

    def make() -> Batcher:
        return Batcher(engine, settings)

    # Only graphs are slow to create; a new batcher picks up weights that have changed since.
    lent = engine.rows.lent(fits, make) if engine.uses_graphs else contextlib.nullcontext(make())
    with lent as batcher:
        samplers = [engine.sampler(request, row, padded=not exact) for row in range(count)]
        mode, into = results[0].mode, list(zip(results, samplers, strict=True))
        ids = batcher.submit(request, engine.plan if mode == "decay" else None, mode, into=into)
        places = {number: place for place, number in enumerate(ids)}
        try:
            while not batcher.is_idle:
                pieces, depths = [""] * count, [engine.stack.num_layers] * count
                for update in batcher.step():
                    if update.error is not None:
                        raise update.error
                    pieces[places[update.id]] += update.text
                    depths[places[update.id]] = update.depth
                yield [Piece(piece, depth) for piece, depth in zip(pieces, depths, strict=True)]
        finally:
            for number in ids:
                batcher.cancel(number)
        cache_bytes = batcher.blocks.nbytes
        engine.tell_exact(results, batcher.runner.inexact)
    prefill_seconds = max(result.prefill_seconds for result in results)  # until all prompts are read
    for result in results:
        result.seconds = time.perf_counter() - started
        result.prefill_seconds = prefill_seconds
        result.cache_bytes = cache_bytes
