"""Detection of collectives that do not match, before they are entered."""
