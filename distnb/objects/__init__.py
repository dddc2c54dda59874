"""Objects by value, for both sides: packing, opening, digests, merging, numbers, and the names that code reads."""
