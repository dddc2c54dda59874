"""Sources: the readers of all kinds of datasets."""
