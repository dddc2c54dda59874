"""Connecting a notebook to engines that stayed when another notebook ended."""
