"""Functions and classes by value, and the names that code reads."""
