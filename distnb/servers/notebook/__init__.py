"""The notebook's side of parameter servers: the channel for closures, their view in a cell, and the cluster."""
