"""The notebook's own modules as files, for engines on machines that do not have them."""
