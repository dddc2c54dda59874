"""The kernel's side of the JupyterLab extension (`extension/`): the panel's content, and the orders that it sends."""
