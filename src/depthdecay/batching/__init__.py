"""Many requests in one batch, each at its own position and depth: `Batcher(engine).submit(request)`, then `step()`."""
