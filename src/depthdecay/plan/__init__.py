"""Plans: how many layers each token runs through, and which. Nothing here imports torch."""
