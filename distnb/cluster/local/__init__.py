"""Processes of this machine: started, watched, ended."""
