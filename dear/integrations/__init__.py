"""Other libraries' own ways to train, over dear: a file for each library. ``import dear`` imports none of them."""
