"""Values and their placement as HTML and as text, drawn from the reports of the processes that hold them."""
