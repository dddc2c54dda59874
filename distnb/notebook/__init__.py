"""The notebook's side: the session and its parts."""
