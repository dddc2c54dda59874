"""What gradient sync must hold, case by case; each runs on every replica and compares with one replica's result."""
