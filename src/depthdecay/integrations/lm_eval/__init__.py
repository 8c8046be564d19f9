"""lm-evaluation-harness: its Hugging Face model with depth decay, and GSM8K from local files."""
