"""The fast path of CPUs: one compiled call a pass, over the model's own weights or over weights in 8 and 4 bits."""
