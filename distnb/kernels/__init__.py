"""Kernels that share the memory of loaded modules with each other and with their engines."""
