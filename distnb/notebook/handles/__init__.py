"""What the notebook holds of objects that live on the engines."""
