"""Decoding on one machine: a request, its passes, sampling, and the result with its statistics."""
