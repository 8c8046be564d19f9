"""Kernels in Triton: products with few rows, attention of a few tokens."""
