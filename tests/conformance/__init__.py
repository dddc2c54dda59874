"""Every promise under every strategy: README.md in this folder says how to add one."""
