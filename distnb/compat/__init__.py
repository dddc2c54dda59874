"""Private names of other libraries: one file per library, checked against the versions that distnb is tested with."""
