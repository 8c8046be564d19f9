"""Depth decay inside transformers: its own generate() with a plan, and a drafter for assisted generation."""
