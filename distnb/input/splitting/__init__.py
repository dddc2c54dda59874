"""How batches are cut, and which replica gets which rows."""
