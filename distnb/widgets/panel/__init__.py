"""The kernel's side of the JupyterLab extension (`extension/`): the panel's content, and the requests that it sends."""
