"""The notebook's side of the one namespace."""
