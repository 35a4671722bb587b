"""Open, keep and close the connections that hold locks."""
