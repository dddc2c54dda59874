"""The programs: each module has one subject."""
