"""How replicas make one tensor of many: the algorithms that a strategy may be given, one in each file."""
