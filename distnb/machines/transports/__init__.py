"""The transports to other machines, one file for each way (an ipyparallel cluster has three)."""
