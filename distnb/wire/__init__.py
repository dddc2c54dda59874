"""What notebook and engines say to each other: messages, their bytes, and the authenticated channel."""
