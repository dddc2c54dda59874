"""A script as one replica of a cluster: who it is, and how it meets the others."""
