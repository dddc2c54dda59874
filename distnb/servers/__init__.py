"""Parameter servers: variables on them, their storage, and the coordinator whose closures workers run."""
