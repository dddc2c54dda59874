"""Objects by value, for both sides: packing, opening, digests, merging, numbers; and what a text reads."""
