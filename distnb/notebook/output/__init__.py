"""What a cell shows of its replicas, as data."""
