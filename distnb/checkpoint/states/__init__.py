"""States: the ways to save and restore each kind of object."""
