"""What has to know a transformers model: loading it, its layers, its keys and values, the maps that repair it."""
