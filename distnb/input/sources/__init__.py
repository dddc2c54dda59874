"""What reads a dataset."""
