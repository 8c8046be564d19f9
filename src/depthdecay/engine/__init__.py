"""Decoding on one machine: a request, its passes, the tokens picked, the answer and its account."""
