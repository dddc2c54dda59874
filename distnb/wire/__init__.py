"""The messages between notebook and engines, their encoding, and the authenticated channel."""
