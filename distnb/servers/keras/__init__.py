"""Keras models on parameter servers."""
