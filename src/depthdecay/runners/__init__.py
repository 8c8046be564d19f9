"""How a pass runs: one contract (`contract`) for prompts, steps, drafts and checks, and the ways that serve it."""
