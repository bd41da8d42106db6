"""Time to accuracy: the same steps of real learning under several methods, as curves over wall time."""
