"""Variables: values that a strategy keeps on its replicas. Only the module `variable` loads torch."""
