"""Triton kernels: matrix products with few rows, attention for a few tokens."""
