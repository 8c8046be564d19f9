"""Depth decay inside other projects: transformers, lm-evaluation-harness, vLLM; drafters for other engines."""
