"""The engine's side of the one namespace."""
