"""The OpenAI API over continuous batching; needs the [serve] extra."""
