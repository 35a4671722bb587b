"""What we tell the server, one file per concept: texts, and functions from a Connection to plain values."""
