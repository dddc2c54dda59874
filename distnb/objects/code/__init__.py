"""Functions and classes by value, and the names that a text reads."""
