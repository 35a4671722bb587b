"""The statements that put fences and version triggers on tables of the application, and the scripts that migrations make of them."""
