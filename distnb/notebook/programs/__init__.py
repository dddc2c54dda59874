"""One program on its way: sent to a team, watched, asked for lines of the user's, ended, and its outcome told."""
