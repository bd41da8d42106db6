"""What may take part in a step, or not: uneven data, clipping, scalers, sparse gradients, early updates."""
