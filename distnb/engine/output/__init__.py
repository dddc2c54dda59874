"""What an engine tells while a program runs: output, errors, telemetry."""
