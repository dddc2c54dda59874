"""Requirements of the gradient aggregation, case by case, run on every replica and compared with a single replica."""
