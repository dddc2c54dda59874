"""The user at a replica: its questions, a debugger's prompt in its frames, and what a failed program leaves for one."""
