"""The kernel's side of the JupyterLab extension (`extension/`): what its panel shows, and the orders that it gives."""
