"""Programs as the session runs them: cells, calls and operations on objects, one at a time."""
