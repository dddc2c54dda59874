"""The events that an engine sends while a program runs: output, widgets, telemetry."""
