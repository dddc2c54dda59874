"""Dataset distribution: sources, splitting, reading ahead."""
