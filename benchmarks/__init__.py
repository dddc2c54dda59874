"""Side-by-side runs against peers. Every figure is a ratio within one run, on one machine."""
