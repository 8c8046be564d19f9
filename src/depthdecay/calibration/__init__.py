"""Calibration: finds which layers a model can do without, fits repairs for them, and makes plans within a budget."""
