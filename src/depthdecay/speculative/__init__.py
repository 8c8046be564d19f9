"""Draft and verify: the full model's own answer in fewer passes. `lossless` tells the story."""
