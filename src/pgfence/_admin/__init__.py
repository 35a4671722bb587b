"""What `schema` and `monitoring` are made of."""
