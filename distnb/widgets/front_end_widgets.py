"""Front ends that do not show custom widgets by themselves: Colab, and those of kernels with ipywidgets 7."""

from __future__ import annotations

import sys

from distnb.cluster.package_versions import version_here

__all__ = ["cure"]

_PICTURES = "The live view is drawn as pictures here. For charts that you can zoom: "


def cure() -> str:
    """Return how the user gets widgets instead of pictures; "" if the front end shows widgets."""
    if "google.colab" in sys.modules:
        return (
            f"{_PICTURES}from google.colab import output; output.enable_custom_widget_manager(), and then "
            "%distnb live widget."
        )
    if (version_here("ipywidgets") or "").partition(".")[0] == "7":
        return f"{_PICTURES}%distnb live widget, if your page shows anywidget's widgets."
    return ""
