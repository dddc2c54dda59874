"""The notebook's side of the namespace that notebook and engines share."""
