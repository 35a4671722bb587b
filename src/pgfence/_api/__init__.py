"""What all public locks share."""
