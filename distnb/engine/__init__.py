"""The code that runs inside an engine: the agent on its main loop, and the control thread alongside it."""
