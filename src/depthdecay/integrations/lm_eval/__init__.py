"""lm-evaluation-harness: its Hugging Face model class with depth decay, and GSM8K from local files."""
