"""Modes: the state of a process that a program sees in addition to names, from the working directory to autocast."""
