"""How values, and where they are, look: HTML and text of what processes told of them."""
