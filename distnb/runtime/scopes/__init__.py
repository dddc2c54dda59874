"""The modules, buffers and metrics of a strategy's scope."""
