"""Learned drafters for other engines: EAGLE-3's form, which vLLM and SGLang load."""
