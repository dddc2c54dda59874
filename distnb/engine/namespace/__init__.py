"""The engine's side of the namespace that it shares with the notebook."""
