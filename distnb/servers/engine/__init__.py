"""The part of an engine that runs closures of the coordinator."""
