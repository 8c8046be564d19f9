"""The fast path on CPUs: one compiled call per pass, over the model's own weights or int8 and int4 ones."""
