"""Programs on the engine: their kinds, how they run, and how they fail."""
