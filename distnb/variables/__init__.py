"""Variables: values that a strategy keeps on its replicas. Importing this loads no torch; `variable` does."""
