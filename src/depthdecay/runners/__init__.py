"""How a pass runs: one contract (`contract`) for prefill, decode steps, drafts and verification, and its runners."""
