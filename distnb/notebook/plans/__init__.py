"""Call plans on the notebook's side. See `distnb/notebook/README.md`."""
