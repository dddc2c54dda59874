"""Engines on other machines, and the transports that reach them."""
