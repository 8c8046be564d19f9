"""Depth decay inside transformers: its own generate by a plan, and a drafter for its assisted generation."""
