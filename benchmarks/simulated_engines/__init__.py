"""Simulated engines: they speak the real protocol over the real sockets, without torch, many in one process.

A notebook's cost for hundreds of replicas can thus be measured on one machine. `replace_engines` makes this process's
next cluster a simulated one:

    notebook (real)  ══ both channels ══  process 0: engines 0, 2, 4, …
                                          process 1: engines 1, 3, 5, …

A simulated replica runs the text of a cell as Python. `engine` lists the names that represent training and waiting.
"""
