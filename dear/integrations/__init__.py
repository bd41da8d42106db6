"""What fits dear into other libraries' trainers. Each module imports its library; dear itself imports none of them."""
