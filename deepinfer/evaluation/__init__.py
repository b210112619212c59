"""What a checkpoint can do: bits per byte on held-out texts, tasks with known answers."""
