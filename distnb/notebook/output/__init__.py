"""The output of replicas in a cell, as data."""
