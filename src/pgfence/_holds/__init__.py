"""Who holds and who waits inside this process. Pure."""
