"""Descriptions of values by the process that holds them, in few bytes and without communication."""
