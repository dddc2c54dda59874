"""The execution of a distributed program: sending, supervision, the user's input, the end, and the outcome."""
