"""The plug-in for vLLM. A package, since its files have the names of their neighbours above."""
