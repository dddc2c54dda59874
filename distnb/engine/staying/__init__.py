"""The engine of a detached cluster, while no notebook is connected."""
