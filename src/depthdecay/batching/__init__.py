"""Many requests in one batch, each at its own position and depth: `Batcher(engine).submit(request)`, then `step()`."""

from depthdecay.batching.batcher import Batcher, BatchSettings, Update
from depthdecay.runners.kv_blocks import Usage

__all__ = ["BatchSettings", "Batcher", "Update", "Usage"]
