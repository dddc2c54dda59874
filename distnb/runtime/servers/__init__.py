"""Variables that live on parameter servers: what a server does, and what the coordinator and the workers ask of it."""
