"""What has to know CUDA: passes as graphs of a whole pass, of single layers, or of a window's passes."""
