"""Code that all public locks share."""
