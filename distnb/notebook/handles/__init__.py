"""Handles: the notebook's references to objects that live on the engines."""
