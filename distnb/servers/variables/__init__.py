"""Variables that live on parameter servers: the server's side, and the side of the coordinator and the workers."""
