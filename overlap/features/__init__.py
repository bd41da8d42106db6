"""Optional parts of a step: uneven data, clipping, scalers, sparse gradients, early updates."""
