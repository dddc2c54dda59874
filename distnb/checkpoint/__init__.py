"""Portable checkpoints: saved under any strategy and number of replicas, restored under any other, or under none."""
