"""States of objects: how each kind of object is saved and restored."""
