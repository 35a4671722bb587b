"""Build the statements that add fences and version triggers to the application's tables, also as migration scripts."""
