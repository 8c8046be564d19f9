"""Learned drafters for other engines, in EAGLE-3 format, which vLLM and SGLang load."""
