"""Open, keep and close the connections of locks and leases."""
