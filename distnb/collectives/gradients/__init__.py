"""Gradients of mirrored parameters, aggregated during the backward pass."""
