"""Call plans on the engine's side. See `distnb/notebook/README.md`."""
