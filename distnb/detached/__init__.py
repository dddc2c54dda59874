"""Clusters whose engines stay when the notebook ends: a daemon owns them in the notebook's place."""
