"""Interaction with the user: a replica's prompts, a debugger in its frames, and the frames kept of a failed program."""
