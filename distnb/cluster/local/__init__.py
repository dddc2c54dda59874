"""The processes of this machine: their start, supervision and end."""
