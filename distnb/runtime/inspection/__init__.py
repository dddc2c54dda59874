"""Compact descriptions of values by the process that holds them, made without communication."""
