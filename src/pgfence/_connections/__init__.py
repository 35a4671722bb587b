"""The connections that hold locks."""
