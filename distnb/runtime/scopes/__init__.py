"""What a strategy's scope does with modules, buffers and metrics."""
