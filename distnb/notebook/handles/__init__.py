"""Handles: the notebook's representatives of objects that live on the engines."""
