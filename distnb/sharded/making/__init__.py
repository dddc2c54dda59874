"""The making of sharded parameters: how they get values, and how these may be lost."""
