"""Parameter servers: what one holds and how it changes, the thread that serves it, and the client that asks it."""
