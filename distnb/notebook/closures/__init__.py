"""The notebook's side of parameter servers: the channel for closures, what a cell shows of them, and their cluster."""
