"""Speculative decoding: draft and verify, for the full model's answer in fewer passes. Start reading at `lossless`."""
