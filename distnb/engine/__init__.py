"""What runs inside an engine: the agent on its main loop, the control thread beside it."""
