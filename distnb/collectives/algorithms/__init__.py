"""Algorithms by which replicas make one tensor of many, one in each file. A strategy may be given one of them."""
