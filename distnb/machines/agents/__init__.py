"""The program that owns the engines of another machine, and the notebook's end of the connection to it."""
