"""CUDA-specific code: CUDA graphs of whole passes and of single layers, compiled layers, Triton kernels."""
