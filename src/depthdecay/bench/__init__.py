"""Measuring speed, and drawing what was measured."""
