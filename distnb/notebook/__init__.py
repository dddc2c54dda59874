"""The notebook's side: the session and what belongs to it."""
