"""Process groups: formed, recorded, ended from outside."""
