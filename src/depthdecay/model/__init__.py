"""Everything tied to a transformers model: loading, its layers, its KV cache, its repair maps."""
