"""The coordinator: its queue of closures, what it packs for workers, and the values that stay with them."""
