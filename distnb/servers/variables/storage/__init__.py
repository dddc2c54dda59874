"""The server's side: the variables that a parameter server holds, and the thread that serves them."""
