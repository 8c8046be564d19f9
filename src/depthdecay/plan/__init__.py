"""What a plan is: how deep each token goes, and through which layers. Nothing here imports torch."""
