"""Looking at values where they are: what a process tells of those it holds, in few bytes and without communicating."""
