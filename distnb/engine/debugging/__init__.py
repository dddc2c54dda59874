"""Interaction with the user: a replica's prompts, a debugger in its frames, and the kept frames of a failed program."""
