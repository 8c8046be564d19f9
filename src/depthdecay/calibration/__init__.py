"""Calibration: which layers a model can do without, how to repair what dropping them breaks, plans within a budget."""
