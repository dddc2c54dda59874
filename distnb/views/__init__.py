"""Models of the views of a cell, a cluster and a value: events in, plain values out. They draw nothing."""
