"""Finding collectives that do not match, before they are entered."""
